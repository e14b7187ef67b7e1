"""Prometheus metrics: what the engine counts, read when they are asked for, and how long requests took."""

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rebased.serve.client import EngineClient

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics(Collector):
    """All metrics of a server. Those of the engine are read when they are asked for."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine, self.registry = engine, CollectorRegistry()
        self.registry.register(self)
        here: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("rebased_requests", "requests that were answered", ["path", "status"], **here)
        here["buckets"] = SECONDS
        self.seconds = Histogram("rebased_request_seconds", "time until the end of an answer", ["path"], **here)
        self.first = Histogram("rebased_first_token_seconds", "time until the first token", **here)

    def collect(self) -> Iterator[Any]:
        """Yield the engine's counts as Prometheus takes them."""
        engine, (stats, prefix_bytes, prefix_states) = self._engine, self._engine.counts
        for name, what, value in (
            ("slots", "choices that can be decoded at once", engine.about.slots),
            ("running", "choices that are being decoded", engine.running),
            ("waiting", "choices that wait for a slot", engine.waiting),
            ("prefix_cache_bytes", "bytes of kept states", prefix_bytes),
            ("prefix_cache_states", "kept states", prefix_states),
        ):
            yield GaugeMetricFamily(f"rebased_{name}", what, value=value)
        for name, what, count in (
            ("prompt_tokens", "tokens of prompts, cached ones included", stats.prompt_tokens),
            ("cached_tokens", "tokens of prompts that were not read again", stats.cached_tokens),
            ("made_tokens", "tokens that were made", stats.made_tokens),
            ("steps", "decoding steps", stats.steps),
            ("step_seconds", "time in decoding steps", stats.step_seconds),
            ("prefill_seconds", "time in reading prompts", stats.prefill_seconds),
            ("failures", "requests that ended with an error of the model or the engine", stats.failures),
        ):
            yield CounterMetricFamily(f"rebased_{name}", what, value=count)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class Measured:
    """An ASGI middleware that counts and times requests."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: tuple[str, ...]) -> None:
        self.app, self.metrics, self.paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status, started = 499, time.monotonic()  # 499: the client left before there was an answer

        async def noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting_status)
        except Exception:
            status = 500
            raise
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"  # a label per made-up path would grow
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.monotonic() - started)
