"""A master's page and metrics over HTTP, who may read them, and its log lines as JSON."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import plancompiler as pc
from plancompiler.cluster.channel import TlsFiles
from plancompiler.cluster.chunks import arrays_to_bytes
from plancompiler.cluster.messages import JobPhase, PhaseChanged, RankOutputs, StepDone
from plancompiler.cluster.token import find_credential
from plancompiler.errors import SecurityError
from plancompiler.master.observation import Observation
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client
from tests.cluster.browser import CHROMIUM, browser
from tests.cluster.conftest import Workers
from tests.examples import mlp

SECONDS = 30.0
SECRET = "0123456789abcdef" * 4
VOID = {"meta", "polyline", "br"}


@dataclass
class Answer:
    """What came of a request."""

    status: int
    headers: dict[str, str]
    text: str


def get(address: str | None, path: str, authorization: str = "", method: str = "GET") -> Answer:
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    if authorization:
        request.add_header("Authorization", authorization)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return Answer(answer.status, dict(answer.headers), answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, dict(error.headers), error.read().decode())


def bearer(server: MasterServer) -> str:
    return f"Bearer {find_credential(server.address).secret}"


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """By name and labels, as Prometheus reads them."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@dataclass
class Outline(HTMLParser):
    """A document's elements; an error where one is closed that is not open."""

    open: list[str] = field(default_factory=list)
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def watched(workers: Workers) -> Iterator[MasterServer]:
    """A master of three ranks, two of which have workers, that has done a job and holds another."""
    with MasterServer(ranks=3, metrics="127.0.0.1:0") as server:
        started = workers(server.address, 2)
        with Client(server.address) as client:
            job = mlp(ranks=2)
            job = pc.Job(**{**vars_of(job), "name": "<script>alert('job')</script>"})
            client.submit(job, 30).result()
            client.submit(mlp(ranks=3), 1)
            yield server
        for worker in started:
            worker.stop()


def vars_of(job: pc.Job) -> dict[str, object]:
    return {name: getattr(job, name) for name in job.__dataclass_fields__}


def test_metrics_and_page_of_a_master_that_works(watched: MasterServer) -> None:
    answer = get(watched.metrics_address, "/metrics", bearer(watched))
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    numbers = samples(answer.text)

    def value(name: str, **labels: str) -> float:
        return numbers[name, tuple(labels.items())]

    assert value("plancompiler_steps_total") == 30
    assert value("plancompiler_queue_length") == 1
    assert value("plancompiler_jobs", phase="queued") == 1
    assert value("plancompiler_jobs_submitted_total") == 2
    assert value("plancompiler_jobs_ended_total", phase="finished") == 1
    assert value("plancompiler_workers", state="idle") == 2
    assert value("plancompiler_workers", state="missing") == 1
    assert value("plancompiler_sent_bytes_total") > 0
    assert value("plancompiler_output_bytes_total") > 0
    assert value("plancompiler_held_bytes", what="outputs") > 0
    assert value("plancompiler_first_step_seconds_count") == 1
    assert value("plancompiler_first_step_seconds_bucket", le="+Inf") == 1
    assert value("process_resident_memory_bytes") > 1 << 20
    assert value("process_open_fds") > 3

    page = get(watched.metrics_address, "/", bearer(watched))
    assert page.status == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    outline = Outline()
    outline.feed(page.text)
    outline.close()
    assert outline.open == []
    tags = [tag for tag, _ in outline.elements]
    assert tags.count("main") == tags.count("h1") == tags.count("script") == 1
    for tag, attributes in outline.elements:
        assert not attributes.keys() & {"src", "href", "onclick", "style"}, tag
        if tag == "svg":
            assert str(attributes["aria-label"]).startswith("Loss of job 1: ")
        if tag == "th":
            assert attributes["scope"] == "col"
    assert "svg" in tags
    assert dict(outline.elements[0][1]) == {"lang": "en"}
    assert "<script>alert('job')</script>" in outline.words
    # Everything that a request of the page could name is in it.
    assert get(watched.metrics_address, "/favicon.ico", bearer(watched)).status == 404
    assert get(watched.metrics_address, "/", bearer(watched), "HEAD").text == ""
    assert get(watched.metrics_address, "/", bearer(watched), "POST").status == 405
    assert get(watched.metrics_address, "/" + "x" * (1 << 16), bearer(watched)).status == 431


def test_strangers_see_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice submit {SECRET}\nops operate {SECRET}ops\n")
    tokens.chmod(0o600)
    with MasterServer(token_file=tokens, metrics="127.0.0.1:0") as server:
        address = server.metrics_address
        basic = b64encode(f"anyone:{SECRET}ops".encode()).decode()
        for path in ("/", "/metrics"):
            assert get(address, path, f"Bearer {SECRET}ops").status == 200
            assert get(address, path, f"Basic {basic}").status == 200
            refused = get(address, path, f"Bearer {SECRET}")
            assert refused.status == 403
            assert "alice may not do this" in refused.text
            for wrong in ("", "Bearer", f"Bearer {SECRET}x", "Basic %%%", "Digest a=b"):
                refused = get(address, path, wrong)
                assert refused.status == 401
                assert refused.headers["WWW-Authenticate"].startswith("Basic")
                assert server.address not in refused.text
        assert get(address, "/nothing").status == 401  # nor which paths there are
        numbers = samples(get(address, "/metrics", f"Bearer {SECRET}ops").text)
        assert numbers["plancompiler_refused_calls_total", (("code", "unauthorized"),)] == 11
        assert numbers["plancompiler_refused_calls_total", (("code", "forbidden"),)] == 2
    assert caplog.text.count("refused an HTTP request of 127.0.0.1:") == 13
    assert SECRET not in caplog.text


def test_beyond_loopback_only_with_certificates(certificates: Path) -> None:
    with pytest.raises(SecurityError, match="--insecure does not count"):
        MasterServer(metrics="0.0.0.0:0", insecure=True)
    files = TlsFiles(*(certificates / name for name in ("ca.pem", "server.pem", "server.key")))
    with MasterServer(tls=files, metrics="0.0.0.0:0") as server:
        port = str(server.metrics_address).rpartition(":")[2]
        known = ssl.create_default_context(cafile=str(files.ca))
        known.check_hostname = False
        request = urllib.request.Request(
            f"https://127.0.0.1:{port}/metrics", headers={"Authorization": bearer(server)}
        )
        with pytest.raises((urllib.error.URLError, OSError)):
            urllib.request.urlopen(request, timeout=SECONDS, context=known)
        known.load_cert_chain(certificates / "client.pem", certificates / "client.key")
        with urllib.request.urlopen(request, timeout=SECONDS, context=known) as answer:
            assert answer.status == 200


def test_strangers_who_say_nothing_count_before_they_speak_tls(certificates: Path) -> None:
    files = TlsFiles(*(certificates / name for name in ("ca.pem", "server.pem", "server.key")))
    with MasterServer(tls=files, metrics="0.0.0.0:0") as server, ExitStack() as stack:
        port = int(str(server.metrics_address).rpartition(":")[2])
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
            for _ in range(33)
        ]
        assert strangers[-1].recv(1) == b""  # one too many


def test_what_is_kept_of_a_long_job_is_bounded() -> None:
    observation = Observation()
    for job_id in range(1, 201):
        observation.note(job_id, PhaseChanged(JobPhase.QUEUED, 0.0))
    assert min(observation.jobs) == 101
    job = observation.jobs[200]
    for step in range(5000):
        job.sampled = 0.0
        observation.note(200, RankOutputs(step, 0, arrays_to_bytes({"loss": 1.0 / (step + 1)})))
        observation.note(200, StepDone(step))
    assert 128 <= len(job.curve) <= 256
    assert job.curve[0] == (0, 1.0)
    assert [step for step, _ in job.curve] == list(range(0, 5000, job.stride))
    assert sum(observation.latencies) == 1
    observation.note(7, StepDone(0))  # of a job that is forgotten


@pytest.mark.processes
def test_log_lines_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    program = """
import logging
from plancompiler.cli.output import configure_logging, log_as_json, print_note
configure_logging()
log_as_json()
logging.getLogger("plancompiler.x").warning("refused %s", "x", extra={"peer": "a", "job": 3})
logging.getLogger("theirs").error("two\\nlines")
print_note("running", 4)
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("plancompiler").exception("fails")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    first, second, third, fourth = map(json.loads, done.stderr.splitlines())
    assert first["time"].endswith("+00:00")
    assert (first["level"], first["logger"]) == ("warning", "plancompiler.x")
    assert (first["message"], first["peer"], first["job"]) == ("refused x", "a", 3)
    assert second["message"] == "two\nlines"
    assert (third["message"], third["job"], third["level"]) == ("running", 4, "info")
    assert "ZeroDivisionError" in fourth["traceback"]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"no browser at {CHROMIUM}: apt-get install chromium"
)
def test_the_page_in_a_browser(watched: MasterServer, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as view:
        view.open(f"http://{watched.metrics_address}/", bearer(watched))
        roles = view.roles()
        title = f"plancompiler master {watched.address}"
        assert roles[0] == ("RootWebArea", title)
        assert ("heading", title) in roles
        assert ("button", "Stop updating") in roles
        for name in ("Jobs", "Workers"):
            assert ("heading", name) in roles
            assert ("region", name) in roles
        assert ("table", "The latest 50 jobs, the newest first") in roles
        assert {name for role, name in roles if role == "columnheader"} >= {"Job", "Loss", "Host"}
        assert ("cell", "<script>alert('job')</script>") in roles
        (curve,) = (name for role, name in roles if role == "image" or role == "img")
        assert curve.startswith("Loss of job 1: ")
        assert all(name for role, name in roles if role in ("button", "region", "table", "image"))

        view.evaluate("document.querySelector('[aria-label=Jobs]').focus()")
        with Client(watched.address) as client:
            client.submit(mlp(ranks=2), 1)
        view.wait_for("document.querySelector('td.number').textContent === '3'")
        assert view.evaluate("document.activeElement.getAttribute('aria-label')") == "Jobs"
        view.evaluate("document.querySelector('button').click()")
        assert ("button", "Go on updating") in view.roles()
        wide = "document.documentElement.scrollWidth > innerWidth"
        view.call(
            "Emulation.setDeviceMetricsOverride",
            width=360,
            height=800,
            deviceScaleFactor=1,
            mobile=False,
        )
        assert view.evaluate(wide) is False  # what is wide scrolls by itself

        sent = [
            event["params"]["request"]["url"]
            for event in view.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        assert {url.split("/")[2] for url in sent} == {watched.metrics_address}
        said = [
            event
            for event in view.events
            if event["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled")
            or (event["method"] == "Log.entryAdded" and "favicon" not in str(event))
        ]
        assert said == []
