"""A small model with definite opinions, an engine over it in the test's own thread, and what it should answer."""

import torch

from local_engine import LocalEngine
from rebased.models import LanguageModel, LMConfig
from rebased.models.job import Event, Failed, Job, Made, PromptRead

TIE = 1e-4  # logits that are closer may change places when others share the batch
SMALL = LMConfig(
    vocab_size=257,
    d_model=16,
    n_layers=2,
    mixers=("short_conv", {"name": "rebased", "n_heads": 2, "key_width": 4}),  # type: ignore[arg-type]
    mlp_ratio=2,
    positions="none",
)


def small_model(config: LMConfig = SMALL, seed: int = 0) -> LanguageModel:
    """Its weights are large enough for the most probable token to be clear."""
    torch.manual_seed(seed)
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(15.0)
    return model


class Listener:
    """Collects the events of a job."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, events: list[Event]) -> None:
        self.events += events

    def tokens(self, choice: int = 0) -> list[int]:
        mine = [event for event in self.events if isinstance(event, Made) and event.sequence == choice]
        return [scored.token for event in mine for scored in event.scored]

    def text(self, choice: int = 0) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Made) and event.sequence == choice)

    def reasons(self) -> list[str]:
        return [event.finish_reason for event in self.events if isinstance(event, Made) and event.finish_reason]

    @property
    def read(self) -> PromptRead:
        return next(event for event in self.events if isinstance(event, PromptRead))

    @property
    def failure(self) -> Failed | None:
        return next((event for event in self.events if isinstance(event, Failed)), None)


def make_engine(model: LanguageModel, slots: int = 4, context: int = 4096, **options: int) -> LocalEngine:
    return LocalEngine(model, slots=slots, context=context, **options)


def run(engine: LocalEngine, *jobs: tuple[Job, Listener]) -> None:
    """Submit jobs and take turns until all are over, without a thread."""
    for job, listener in jobs:
        engine.submit(job, listener)
    turns = 0
    while engine.busy:
        engine.turn()
        turns += 1
        assert turns < 10_000


def is_greedy(model: LanguageModel, prompt: list[int], made: list[int]) -> bool:
    """Whether each token is the most probable one after those before it, or as good as that."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *made]]))[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(made).unsqueeze(1)).squeeze(1)
    return bool((chosen >= logits.amax(-1) - TIE).all())
