"""Is a pod's software the master's? Each check judges the facts in one function."""

from __future__ import annotations

from zeropods.pods.preflight.check import Check
from zeropods.pods.preflight.expectation import Expectation
from zeropods.pods.preflight.operations import CPU_ADAM
from zeropods.pods.preflight.probe import CML_NAMES, PROGRAMS, Facts

PACKAGES = ("zeropods", "torch", "transformers", "deepspeed", "accelerate")
DEBIAN_PACKAGES = "openssh-client openssh-server pdsh"
COMPILE = "run 'python tools/compile_ops.py' on the pod"


def python(facts: Facts, expected: Expectation) -> Check:
    """The same release of Python; another patch release is let pass."""
    found, wanted = facts.versions["python"] or "", expected.versions["python"] or ""
    if found == wanted:
        return Check("python", "ok", found)
    same_release = found.split(".")[:2] == wanted.split(".")[:2]
    remedy = f"the master has {wanted}; use the same interpreter on all pods"
    return Check("python", "warning" if same_release else "failed", found, remedy)


def package(name: str, facts: Facts, expected: Expectation) -> Check:
    """The master's version of a package."""
    found, wanted = facts.versions.get(name), expected.versions.get(name)
    if found is not None and found == wanted:
        return Check(name, "ok", found)
    if wanted is None:
        return Check(name, "failed", found or "missing", f"the master has no {name}; install requirements.txt there")
    plain = wanted.partition("+")[0]
    return Check(
        name, "failed", found or "missing", f"the master has {wanted}; on the pod: pip install {name}=={plain}"
    )


def operations(facts: Facts, expected: Expectation) -> Check:
    """The operation that optimizer offload needs can be loaded."""
    if expected.offload is False:
        return Check("ops", "ok", "none needed")
    return _operation(CPU_ADAM, facts.operations[CPU_ADAM], expected)


def _operation(name: str, state: str, expected: Expectation) -> Check:
    if state == "compiled":
        return Check("ops", "ok", state)
    kind, _, detail = state.partition(": ")
    if kind == "compilable":
        return Check(
            "ops", "warning", f"{name} not compiled", f"the first run compiles it, a minute or so; or {COMPILE}"
        )
    if kind == "compiling":
        return Check("ops", "warning", f"{name} being compiled", "wait a minute; the run would wait for it")
    remedy = "on the pod: apt-get install g++ python3-dev, pip install ninja; without it no optimizer offload"
    return Check("ops", "failed" if expected.offload else "warning", f"{name}: {detail}", remedy)


def project(facts: Facts, expected: Expectation) -> Check:
    """The project folder is there, and its files are the master's."""
    if not facts.project:
        return Check("project", "failed", "missing", f"make {expected.project} visible on the pod: one folder for all")
    for name, wanted in expected.digests.items():
        found = facts.digests.get(name)
        if wanted is None:
            return Check("project", "failed", f"no {name}", f"name a file of {expected.project} on the master")
        if found != wanted:
            value = f"another {name}" if found else f"no {name}"
            return Check("project", "failed", value, f"{expected.project} is not the master's folder; share or copy it")
    return Check("project", "ok", "same files" if expected.digests else "there")


def programs(facts: Facts) -> Check:
    """What a pod that starts and serves others needs."""
    missing = [name for name in PROGRAMS if not facts.programs[name]]
    if missing:
        return Check("programs", "failed", f"no {', no '.join(missing)}", f"apt-get install {DEBIAN_PACKAGES}")
    return Check("programs", "ok", ", ".join(PROGRAMS))


def cml(facts: Facts, address: str | None) -> Check:
    """CML says who the pod is, and it is the pod that was asked for."""
    missing = [name for name in CML_NAMES if name not in facts.cml]
    if missing:
        return Check("CML", "warning", f"no {', no '.join(missing)}", "start the pod as a CML session or worker")
    stated = facts.cml["CDSW_IP_ADDRESS"]
    if address is not None and stated != address:
        return Check("CML", "failed", f"is {stated}", f"another pod answers at {address}; start the cluster anew")
    return Check("CML", "ok", facts.cml["CDSW_ENGINE_ID"])
