"""Pins traces against a small receiver of OTLP over HTTP.

There is a span for each answer within its client's trace, with its phases in order and without a
gap; a server without traces imports no part of OpenTelemetry.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.api_kit import Api

from mstar_tp.common.errors import ConfigError
from mstar_tp.frontend.metrics.traces import Traces

BODY: dict[str, Any] = {"model": "pirate", "prompt": "xyz", "max_tokens": 4, "temperature": 0}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def receiver() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A collector's address, and what it was sent."""
    got: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["Content-Encoding"] in (None, "identity")
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for pair in span.attributes:
        found[pair.key] = getattr(pair.value, pair.value.WhichOneof("value"))
    return found


def test_each_answer_is_a_span_in_its_clients_trace_with_the_parts_of_its_way(
    tmp_path: Path,
) -> None:
    api = Api(tmp_path)
    try:
        with receiver() as (endpoint, got):
            traces = Traces(endpoint, "tiny")
            api.conductor.requests.on_ended.append(traces.ended)
            headers = {"X-Request-Id": "r1", "traceparent": f"00-{TRACE}-{PARENT}-01"}
            with api.http() as http:
                http.post("/v1/completions", json=BODY | {"n": 2}, headers=headers)
                http.post("/v1/completions", json=BODY, headers={"traceparent": "00-zz-1-01"})
                unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
                http.post("/v1/completions", json=BODY, headers=unsampled)
                api.ranks.fail = lambda request: "its adapter is gone"
                http.post("/v1/completions", json=BODY | {"model": "tiny"})
            traces.close()
    finally:
        api.close()
    resources = [resource for request in got for resource in request.resource_spans]
    assert {attributes(each.resource)["service.name"] for each in resources} == {"mstar-tp"}
    spans = [span for each in resources for scope in each.scope_spans for span in scope.spans]
    roots = [span for span in spans if span.name == "llm_request"]
    first, second, own, failed = roots  # what its client does not sample is not sent
    for place, span in enumerate((first, second)):
        assert span.trace_id.hex() == TRACE
        assert span.parent_span_id.hex() == PARENT
        said = attributes(span)
        assert said["gen_ai.request.id"] == "r1"
        assert said["mstar_tp.answer"] == place
        assert said["mstar_tp.adapter"] == "pirate"
        assert said["mstar_tp.slot"] == 3
        assert said["mstar_tp.outcome"] == "length"
        assert said["gen_ai.usage.prompt_tokens"] == len(api.ids("xyz"))
        assert said["gen_ai.usage.completion_tokens"] == 4
        assert "xyz" not in str(span)
    assert own.trace_id.hex() != TRACE and not own.parent_span_id
    assert attributes(failed)["mstar_tp.outcome"] == "failed"
    assert "mstar_tp.adapter" not in attributes(failed)
    assert failed.status.code == 2
    for root in roots:
        parts = [span for span in spans if span.parent_span_id == root.span_id]
        names = (
            ["prepare", "queue"] if root is failed else ["prepare", "queue", "prefill", "decode"]
        )
        assert [part.name for part in parts] == names
        assert all(part.trace_id == root.trace_id for part in parts)
        times = [moment for p in parts for moment in (p.start_time_unix_nano, p.end_time_unix_nano)]
        assert times == sorted(times)
        assert times[0] == root.start_time_unix_nano
        assert times[1:-1:2] == times[2::2]  # one ends where the next begins
        assert times[-1] <= root.end_time_unix_nano


def test_an_endpoint_that_is_no_url_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"server.otlp_traces_endpoint: 'c:4317' is no http"):
        Traces("c:4317", "tiny")


def test_without_the_package_the_refusal_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install mstar-tp\[otel\]"):
        Traces("http://127.0.0.1:1/v1/traces", "tiny")


def test_a_server_without_traces_imports_nothing_of_them() -> None:
    code = (
        "import sys, mstar_tp.frontend.supervisor, mstar_tp.frontend.api.app;"
        "print([name for name in sys.modules if 'opentelemetry' in name or 'traces' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
