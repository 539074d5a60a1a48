"""The demo page in a real browser: asked, given tables, attacked, compared, ended; with a model of one's own data."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from tests.full.conftest import ROOT
from tests.full.demo_page import SECONDS, Served, start, untrained_runs
from tests.full.forks import train_ranks
from tests.pages import blocks
from zeropods.cli import main
from zeropods.programs import free_port

ATTACK = "<img src=x onerror=document.title='stolen'><script>document.title='stolen'</script> how many?"
WAIT = 600_000
"""Milliseconds: a page is 70 requests, and other tests want the cores too."""
SAID = "document.querySelector('#zp-answer .zp-question, #zp-answer .zp-message')?.innerText"
"""What the page answered to, or why it did not."""
APPLICATION = ROOT / "cml" / "run_demo.py"
CATS = "Name;Age\nTom;3\nKit;5\n<b>Mia</b>;2\n"


@pytest.fixture(scope="module")
def runs(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, the first with the better score, and one with a score as good whose weights are damaged."""
    folder = untrained_runs(tmp_path_factory.mktemp("demo") / "runs", sample)
    damaged = Path(shutil.copytree(folder / "first", folder / "damaged")) / "model"
    os.truncate(damaged / "model.safetensors", 1000)
    # The newest of all.
    os.utime(damaged / "config.json")
    return folder


@pytest.fixture(scope="module")
def application(runs: Path, sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The application as CML starts it."""
    port = str(free_port("127.0.0.1"))
    log = tmp_path_factory.mktemp("application") / "log"
    served = start([APPLICATION, "--runs", runs, "--data", sample], log, CDSW_APP_PORT=port)
    assert served.address == f"http://127.0.0.1:{port}/"
    yield served
    served.end()


@pytest.fixture(scope="module")
def verb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`zeropods demo`, on a port that it chose, as the commands of docs/own_data.md lead to it from its CSV files."""
    commands, table, questions, *_ = blocks((ROOT / "docs" / "own_data.md").read_text(encoding="utf-8"))
    folder = tmp_path_factory.mktemp("own")
    (folder / "tables").mkdir()
    (folder / "tables" / "people.csv").write_text(table)
    (folder / "questions.csv").write_text(questions)
    from_csv, prepare, train, predict, demo = map(shlex.split, commands.replace("\\\n", "").splitlines())
    assert train[:2] == ["python", "textsql_train.py"]
    with contextlib.chdir(folder):
        assert main(from_csv[1:]) == main(prepare[1:]) == 0
        train_ranks(train[2:], 1, folder / "said")
        assert main(predict[1:]) == 0
    served = start(["-m", *demo], folder / "log", cwd=folder)
    yield served
    served.end()


@pytest.fixture(scope="module")
def page(chromium: Browser, application: Served) -> Iterator[Page]:
    """A visitor's page, which the tests use one after the other."""
    context = chromium.new_context()
    context.on("request", lambda request: application.requests.append(request.url))
    yield opened(context, application)
    context.close()


def opened(visit: BrowserContext, served: Served) -> Page:
    """The page with its first table in place."""
    visit.set_default_timeout(WAIT)
    page = visit.new_page()
    page.goto(served.address)
    for shown in ("#zp-preview table", "#zp-examples tbody tr"):
        page.locator(shown).first.wait_for()
    return page


def ask(page: Page, question: str) -> str:
    """What the page answers to a question."""
    before = page.evaluate(SAID)
    page.fill("#zp-question textarea", question)
    page.click("#zp-ask")
    page.wait_for_function(f"before => {SAID} && {SAID} !== before", arg=before)
    return page.inner_text("#zp-answer")


def upload(page: Page, content: bytes) -> str:
    """What the page shows of an uploaded table."""
    page.click("#zp-upload button")
    file = {"name": "cats.csv", "mimeType": "text/csv", "buffer": content}
    page.set_input_files("#zp-upload input[type=file]", file)  # type: ignore[arg-type]
    page.wait_for_selector("#zp-preview:has-text('cats.csv')")
    return page.inner_text("#zp-preview")


def sent(served: Served, event: str, data: list[object]) -> str:
    """What the page's server answers to a program that sends an event as a browser does, with data of its own."""
    api = served.address + "gradio_api/queue/"
    with urlopen(served.address + "config", timeout=SECONDS) as config:
        (number,) = [one["id"] for one in json.load(config)["dependencies"] if one["api_name"] == event]
    body = json.dumps({"fn_index": number, "data": data, "session_hash": event}).encode()
    urlopen(Request(api + "join", body, {"Content-Type": "application/json"}), timeout=SECONDS).close()
    with urlopen(f"{api}data?session_hash={event}", timeout=SECONDS) as answers:
        return next(line for line in map(bytes.decode, answers) if "process_completed" in line)


def test_an_example_is_answered_with_query_rows_and_what_was_expected(page: Page) -> None:
    question = page.inner_text("#zp-examples tbody tr:nth-child(2) td:nth-child(1)")
    expected = page.inner_text("#zp-examples tbody tr:nth-child(2) td:nth-child(2)")
    page.click("#zp-examples tbody tr:nth-child(2)")
    page.wait_for_selector("#zp-answer .zp-card")
    assert page.input_value("#zp-question textarea") == page.inner_text(".zp-question") == question
    assert page.inner_text(".zp-card > .zp-sql").startswith("SELECT")
    assert f"Expected: {expected}" in page.inner_text(".zp-expected")
    assert re.search(r"\d ms to write the query, \d+\.\d\d ms to execute it", page.inner_text(".zp-time"))


def test_another_table_brings_its_own_questions(page: Page) -> None:
    before = page.inner_text("#zp-examples")
    page.click("#zp-table input")
    page.locator("#zp-table [role=option]").nth(3).click()
    page.wait_for_function("before => document.querySelector('#zp-examples').innerText !== before", arg=before)
    assert page.input_value("#zp-question textarea") == page.inner_text("#zp-examples tbody tr:first-child td")


def test_two_runs_answer_side_by_side(page: Page) -> None:
    page.click("#zp-other input")
    page.locator("#zp-other [role=option]").nth(2).click()
    ask(page, "How many are there?")
    titles = page.locator(".zp-card h3").all_inner_texts()
    assert titles == ["t5-tiny · no ZeRO · 75% right on test · first", "t5-tiny · no ZeRO · 50% right on test · second"]
    first, second = (card.bounding_box() for card in page.locator(".zp-card").all())
    assert first and second and first["y"] == second["y"] and first["x"] < second["x"]


@pytest.mark.parametrize("event", ["upload", "ask_1"], ids=["file", "question"])
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "file"])
def test_a_file_that_was_not_uploaded_is_no_input(verb: Served, tmp_path: Path, event: str, streamed: bool) -> None:
    """Whatever has the form of a file would be read, or copied to where anybody can fetch it."""
    secret = tmp_path / "secret.csv"
    secret.write_text("Word\nsesame\n")
    file = {"path": str(secret), "is_stream": streamed, "meta": {"_type": "gradio.FileData"}}
    said = sent(verb, event, {"upload": [file], "ask_1": [None, "", None, None, file]}[event])
    assert "a file that was not uploaded here" in said and "sesame" not in said


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [("Host", "example.org", 400), ("Host", "localhost", 200), ("Sec-Fetch-Site", "cross-site", 403)],
)
def test_other_names_and_pages_are_refused(verb: Served, header: str, value: str, status: int) -> None:
    request = Request(verb.address + "gradio_api/reset", b'{"event_id": "none"}', {"Content-Type": "application/json"})
    request.add_header(header, value)
    try:
        answered = urlopen(request, timeout=SECONDS).status
    except HTTPError as error:
        answered = error.code
    assert answered == status


def test_a_hostile_question_is_text(page: Page) -> None:
    ask(page, ATTACK)
    assert page.inner_text(".zp-question") == ATTACK
    assert page.locator("#zp-answer img, #zp-answer script").count() == 0
    assert page.title() == "Ask a table"
    page.set_viewport_size({"width": 480, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 480


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("", "There is no question yet"),
        ("zx qj " * 150, "tokens, but first was trained on at most 256"),
        ("'; DROP TABLE cells; --", "SELECT"),
        ("\x07 \x1b[31m 猫は何匹？ \u202e", "SELECT"),
    ],
    ids=["empty", "too many tokens", "injection", "other scripts"],
)
def test_any_question_gets_an_answer_or_a_line(page: Page, question: str, said: str) -> None:
    shown = ask(page, question)
    assert said in shown and "Traceback" not in shown


def test_an_uploaded_table_is_asked_and_is_no_other_visitor_s(
    page: Page, chromium: Browser, application: Served
) -> None:
    shown = upload(page, CATS.encode())
    assert "3 rows" in shown and "<b>Mia</b>" in shown and "Age (number)" in shown
    ask(page, "How old is Kit?")
    assert re.search(r"SELECT .*(Name|Age) FROM table", page.inner_text(".zp-card .zp-sql"))
    assert page.locator(".zp-expected").count() == 0
    other = chromium.new_context()
    try:
        second = opened(other, application)
        assert "cats.csv" not in second.inner_text("#zp-preview")
        shown = upload(second, b"Name,Name\n1,2\n")
        assert shown.strip() == "The file cats.csv: two columns are named 'Name'; rename one"
        assert ask(second, "How many are there?").strip() == second.inner_text("#zp-preview").strip()
    finally:
        other.close()


def test_the_browser_asked_this_machine_only(page: Page, application: Served) -> None:
    assert len(application.requests) > 20
    assert [url for url in application.requests if not url.startswith((application.address, "data:", "blob:"))] == []


def test_a_damaged_model_among_others_is_passed_over(page: Page, application: Served) -> None:
    assert re.search(r"damaged/model: cannot be loaded .*; passed over", application.log.read_text())
    assert "first" in page.locator("input").first.input_value()


def test_a_model_of_one_s_own_data_is_asked(chromium: Browser, verb: Served) -> None:
    page = chromium.new_page()
    page.set_default_timeout(WAIT)
    page.goto(verb.address)
    page.wait_for_selector("#zp-examples tbody tr")
    assert "people: Name, Town, Weight (kg), Born" in page.input_value("#zp-table input")
    page.fill("#zp-question textarea", "Where does Bo live?")
    page.click("#zp-ask")
    page.wait_for_selector("#zp-answer .zp-card")
    assert page.inner_text(".zp-card > .zp-sql").startswith("SELECT")
    page.close()


@pytest.mark.parametrize(
    ("fixture", "number"), [("verb", signal.SIGTERM), ("application", signal.SIGINT)], ids=["verb", "application"]
)
def test_a_signal_ends_it_well_and_frees_the_port(
    request: pytest.FixtureRequest, fixture: str, number: signal.Signals
) -> None:
    """The last: it ends what the others used, with a page still open."""
    served: Served = request.getfixturevalue(fixture)
    before = len(served.log.read_text())
    served.process.send_signal(number)
    assert served.process.wait(timeout=600) == 0
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", served.port))
    assert "Traceback" not in served.log.read_text()[before:]
