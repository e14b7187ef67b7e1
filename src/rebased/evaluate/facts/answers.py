"""The answers of a model, and how many of them are correct, in total and by distance."""

from collections.abc import Sequence
from typing import NamedTuple


class Answer(NamedTuple):
    """The answer of a model to one question."""

    fact: int  # index of the fact
    distance: int  # tokens since the answer in the context; 0 if the context lacks the fact
    correct: bool  # every token of the answer is the most likely one after those before it
    nats: float  # -ln p of the whole answer
    tokens: int  # how many the answer has


class Tally(NamedTuple):
    """Counts over several answers."""

    asked: int
    correct: int
    nats: float  # mean of -ln p over answers
    nearest: int  # smallest and largest distance, both included
    farthest: int

    @property
    def accuracy(self) -> float:
        """correct / asked."""
        return self.correct / self.asked


def tally(answers: Sequence[Answer]) -> Tally:
    """The counts over one or more answers."""
    if not answers:
        raise ValueError("there is no answer to count; ask at least one question")
    distances = [answer.distance for answer in answers]
    nats = sum(answer.nats for answer in answers) / len(answers)
    right = sum(answer.correct for answer in answers)
    return Tally(len(answers), right, nats, min(distances), max(distances))


def tally_by_distance(answers: Sequence[Answer]) -> list[Tally]:
    """One tally per class of distances 2^i to 2^(i+1) - 1 that has answers, nearest first. Distance 0 is left out."""
    classes: dict[int, list[Answer]] = {}
    for answer in answers:
        classes.setdefault(answer.distance.bit_length(), []).append(answer)
    return [
        tally(classes[bits])._replace(nearest=2 ** (bits - 1), farthest=2**bits - 1) for bits in sorted(classes) if bits
    ]
