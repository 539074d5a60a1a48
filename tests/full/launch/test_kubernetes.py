"""The files of `kubernetes/`: the manifest by Kubernetes' own schemas, and `node.sh` as the pods of a Job run it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.full.launches import RANK, ROOT, WAIT_SECONDS, train, until

MANIFEST = ROOT / "kubernetes" / "train.yaml"
NODE = ROOT / "kubernetes" / "node.sh"


def resources() -> dict[str, Any]:
    """The manifest's documents by their kinds."""
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


def test_the_manifest_is_valid_by_kubernetes_own_schemas_which_know_all_of_its_keys() -> None:
    validation = pytest.importorskip("kubernetes_validate", reason="see requirements-dev.txt")
    for document in resources().values():
        validation.validate(document, validation.latest_version(), strict=True)


def test_names_and_numbers_of_the_manifest_agree() -> None:
    job, service, claim = (resources()[kind] for kind in ("Job", "Service", "PersistentVolumeClaim"))
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(variables["PODS"])
    assert variables["JOB"] == name and pod["subdomain"] == service["metadata"]["name"] == name
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert variables["CPUS"] == container["resources"]["requests"]["cpu"]
    assert variables["PROJECT"] == container["workingDir"]
    (volume,) = [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert (ROOT / container["command"][1]) == NODE and (ROOT / container["args"][0]).is_file()
    (exits,) = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert (exits["containerName"], exits["values"]) == (container["name"], [os.EX_TEMPFAIL])


def pod(number: int, folder: Path, *arguments: object, **variables: object) -> subprocess.Popen[str]:
    """What a pod of the Job runs."""
    given = {
        "JOB": "zeropods", "PODS": 2, "JOB_COMPLETION_INDEX": number, "FIRST_POD": "localhost", "PROJECT": ROOT,
        "PYTHON": sys.executable, **variables,
    }  # fmt: skip
    environment = {**os.environ, **{name: str(value) for name, value in given.items()}}
    return subprocess.Popen(
        ["bash", str(NODE), RANK, *map(str, arguments)],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(pods: list[subprocess.Popen[str]]) -> list[str]:
    return [pod.communicate(timeout=WAIT_SECONDS)[0] for pod in pods]


def test_pods_are_nodes_of_one_run_which_saves_when_they_are_to_end_and_goes_on_when_they_are_made_anew(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    first = [pod(number, tmp_path, "--outputdir", run, "--seconds", 600, SLOTS=2) for number in (0, 1)]
    train(run, 4)
    # As Kubernetes ends a pod: SIGTERM to its first process.
    for process in first:
        process.send_signal(signal.SIGTERM)
    said = ended(first)
    assert [process.returncode for process in first] == [os.EX_TEMPFAIL] * 2, said
    assert (run / "saved").exists()
    again = [pod(0, tmp_path, "--outputdir", run, "--seconds", 600)]
    # The stand-in for a rank does not wait for the others, as a real one does.
    until(lambda: json.loads((run / "config.json").read_text())["attempt"] == 1)
    again.append(pod(1, tmp_path, "--outputdir", run, "--seconds", 600))
    said = ended(again)
    assert [process.returncode for process in again] == [0, 0], said
    ranks = [json.loads((run / "ranks" / f"{number}.json").read_text()) for number in (0, 1)]
    assert [(rank["host"], rank["status"]) for rank in ranks] == [("zeropods-0", "ok"), ("zeropods-1", "ok")]


def test_a_pod_that_is_to_end_while_it_waits_for_the_first_one_ends_at_once(tmp_path: Path) -> None:
    process = pod(1, tmp_path, FIRST_POD="nobody.invalid")
    until(lambda: "sleep" in [child.name() for child in psutil.Process(process.pid).children()])
    process.send_signal(signal.SIGTERM)
    (said,) = ended([process])
    assert process.returncode == os.EX_TEMPFAIL
    assert said == "kubernetes: asked to end before nobody.invalid had an address\n"


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"JOB": ""}, "kubernetes: the name of the Job is not set; see kubernetes/train.yaml"),
        ({"JOB_COMPLETION_INDEX": ""}, "kubernetes: not a pod of an Indexed Job; see kubernetes/train.yaml"),
        (
            {"FIRST_POD": "nobody.invalid", "NAME_SECONDS": 0},
            "kubernetes: nobody.invalid: no address after 0 s; is the Service zeropods there?",
        ),
        ({"PYTHON": "/nowhere"}, "zeropods-1: PYTHON /nowhere: not there"),
    ],
)
def test_what_is_missing_is_said_in_one_line(tmp_path: Path, variables: dict[str, object], reason: str) -> None:
    process = pod(1, tmp_path, **variables)
    (said,) = ended([process])
    assert process.returncode == 1 and reason in said and said.count("\n") == 1
