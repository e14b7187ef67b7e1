"""What a model answered: how many answers are right, word for word, and by the distance to where they were told."""

from collections.abc import Sequence
from typing import NamedTuple


class Answer(NamedTuple):
    fact: int
    distance: int  # 0: the context does not tell
    correct: bool  # every token of the answer is the most likely one after those before it
    nats: float  # -ln p of the whole answer
    tokens: int


class Tally(NamedTuple):
    asked: int
    correct: int
    nats: float  # mean of -ln p over answers
    nearest: int  # distances, both ends included
    farthest: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.asked


def tally(answers: Sequence[Answer]) -> Tally:
    if not answers:
        raise ValueError("there is no answer to count")
    distances = [answer.distance for answer in answers]
    nats = sum(answer.nats for answer in answers) / len(answers)
    right = sum(answer.correct for answer in answers)
    return Tally(len(answers), right, nats, min(distances), max(distances))


def tally_by_distance(answers: Sequence[Answer]) -> list[Tally]:
    """A tally for each power of two of distances at which something was asked, the nearest first."""
    classes: dict[int, list[Answer]] = {}
    for answer in answers:
        classes.setdefault(answer.distance.bit_length(), []).append(answer)
    return [
        tally(classes[bits])._replace(nearest=2 ** (bits - 1), farthest=2**bits - 1) for bits in sorted(classes) if bits
    ]
