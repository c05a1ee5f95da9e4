"""Traces of requests for OpenTelemetry: a span each answer, and one for each latency phase.

The module is imported only where traces are asked for. Spans are made when an answer is over, from
the times that metrics are made of too; another thread sends them, and drops those that do not fit
its queue.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from mstar_tp.common.errors import ConfigError
from mstar_tp.common.version import VERSION
from mstar_tp.frontend.metrics.counters import Ended, Times
from mstar_tp.frontend.metrics.outcomes import Outcome
from mstar_tp.frontend.ranks.request_handle import Submission

logger = logging.getLogger(__name__)

EXPORT_WITHIN_S = 2.0
"""The seconds of one try to send; the server's end waits for no more."""
SERVICE = "mstar-tp"
"""The service's name, unless OTEL_SERVICE_NAME says otherwise."""


class Traces:
    """The maker of spans. The event loop's thread."""

    def __init__(self, endpoint: str, model: str, exporter: Any = None) -> None:
        """``endpoint`` takes OTLP over HTTP; ``exporter`` sends spans instead, for tests.

        Raises:
            ConfigError: OpenTelemetry is not installed, or ``endpoint`` is no URL.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"server.otlp_traces_endpoint: {endpoint!r} is no http:// or https:// URL: give "
                "the whole one that takes OTLP over HTTP, as http://localhost:4318/v1/traces"
            )
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"server.otlp_traces_endpoint: {error.name} is not installed: "
                "pip install mstar-tp[otel], or leave the endpoint out"
            ) from None
        own = Resource({"service.name": SERVICE, "service.version": VERSION})
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()))
        sends = exporter or OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_WITHIN_S)
        self._provider.add_span_processor(BatchSpanProcessor(sends))
        self._tracer = self._provider.get_tracer("mstar_tp", VERSION)
        self._model = model
        self._extract = TraceContextTextMapPropagator().extract
        self._trace = trace

    def ended(self, request: Ended, submission: Submission) -> None:
        """Make the spans of an answer that is over."""
        trace, times = self._trace, request.times
        # The clock of the times has no date: now is the same moment by both.
        date = time.time_ns() - time.monotonic_ns()

        def at(moment: float) -> int:
            return date + int(moment * 1e9)

        origin = submission.origin
        parent = origin.traceparent if origin is not None else None
        span = self._tracer.start_span(
            "llm_request",
            context=self._extract({"traceparent": parent}) if parent else None,
            kind=trace.SpanKind.SERVER,
            start_time=at(times.arrived),
            attributes=self._attributes(request, submission),
        )
        within = trace.set_span_in_context(span)
        for name, start, end in _parts(times):
            part = self._tracer.start_span(name, context=within, start_time=at(start))
            part.end(at(end))
        if request.outcome is Outcome.FAILED:
            span.set_status(trace.StatusCode.ERROR)
        span.end(at(times.ended))

    def close(self) -> None:
        """Send what is left. Blocks, for a few tries to send at most."""
        self._provider.shutdown()

    def _attributes(self, request: Ended, submission: Submission) -> dict[str, Any]:
        """Return a span's attributes, named as vLLM's are where they mean the same."""
        times, params = request.times, submission.params
        found: dict[str, Any] = {
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.usage.prompt_tokens": request.prompt_tokens,
            "gen_ai.usage.completion_tokens": request.generated_tokens,
            "gen_ai.latency.e2e": times.ended - times.arrived,
            "mstar_tp.answer": request.place,
            "mstar_tp.outcome": request.outcome.value,
            "mstar_tp.slot": request.slot,
        }
        if submission.adapter is not None:
            found["mstar_tp.adapter"] = submission.adapter.name
            found["mstar_tp.adapter_generation"] = submission.adapter.generation
        if times.queued_s is not None:
            found["gen_ai.latency.time_in_queue"] = times.queued_s
        if times.first_token:
            found["gen_ai.latency.time_to_first_token"] = times.first_token - times.arrived
        return found


def _parts(times: Times) -> list[tuple[str, float, float]]:
    """Return the latency phases that a request reached, each with its start and end."""
    parts = [("prepare", times.arrived, times.taken)]
    if not times.first_token:
        return [*parts, ("queue", times.taken, times.ended)]
    began = times.taken + (times.queued_s or 0.0)
    return [
        *parts,
        ("queue", times.taken, began),
        ("prefill", began, times.first_token),
        ("decode", times.first_token, times.last_token),
    ]
