"""An engine in the test's own process: in a thread once it is started, else stepped by hand."""

import threading
from collections.abc import Callable
from typing import Any

from rebased.data.tokenizer import ByteTokenizer
from rebased.models import LanguageModel
from rebased.serve.client import EngineClient
from rebased.serve.engine import Close, Command, Engine, Update


class ThreadLine:
    """Reaches an engine in a thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.thread: threading.Thread | None = None

    def open(self, arrived: Callable[[Update], None], lost: Callable[[str], None]) -> None:
        def run() -> None:
            try:
                self.engine.run()
            except BaseException as error:
                lost(f"the engine ended by itself: {error!r}")
                raise

        self.engine.post = arrived
        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def send(self, command: Command) -> None:
        self.engine.obey(command)

    def close(self) -> None:
        self.engine.obey(Close())
        if self.thread is not None:
            self.thread.join(30)

    @property
    def alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


class LocalEngine(EngineClient):
    """A client together with its engine."""

    lag = 0  # of its scheduler; a GPU has 1

    def __init__(self, model: LanguageModel, *, max_waiting: int = 1024, **options: Any) -> None:
        self.engine = Engine(model, **options)
        self.engine.scheduler.lag = self.lag
        self.line = ThreadLine(self.engine)
        super().__init__(self.engine.about(), ByteTokenizer(), self.line, max_waiting=max_waiting)
        self.engine.post = self._arrived
        self.stats = self.engine.scheduler.stats
        self.scheduler, self.decoder, self.prefixes = self.engine.scheduler, self.engine.decoder, self.engine.prefixes

    @property
    def busy(self) -> bool:
        """Whether jobs are under way or wait, or are to be dropped."""
        return bool(self._clients or self.engine._inbox or self.engine._jobs)

    def _in_loop(self, function: Callable[[], None]) -> None:
        if self._loop is None:
            function()
        else:
            super()._in_loop(function)

    def turn(self) -> None:
        """Let the engine make a step."""
        self.engine.turn()
