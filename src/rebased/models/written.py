"""What a scheduler tells, as events of jobs with text. Stop strings are found here: a scheduler knows tokens alone."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rebased.data.detokenize import TextStream
from rebased.data.tokenizer import Tokenizer
from rebased.models.job import Began, Event, Failed, FinishReason, Job, Made, NewTokens, Scored, Told


@dataclass(eq=False)
class _Sequence:
    """A sequence that is being written."""

    number: int  # by which the scheduler knows it
    job: Job
    sequence: int  # among those of the job
    text: TextStream
    new: list[Scored] = field(default_factory=list)
    count: int = 0  # tokens
    finish_reason: FinishReason | None = None


class Written:
    """The jobs of one scheduler, as they are written.

    Args:
        tokenizer: turns tokens into text. Without one, texts are empty.
        stop: stop(number, count) is called where a stop string ends a sequence after `count` tokens. The scheduler may
            have made more; they are left out.
        cancel: cancel(job) is called where the text of a job cannot be written.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stop: Callable[[int, int], None], cancel: Callable[[Job], None]
    ) -> None:
        self._tokenizer, self._stop, self._cancel = tokenizer, stop, cancel
        self._jobs: dict[int, Job] = {}
        self._left: dict[int, int] = {}  # sequences that are not over, by the key of their job
        self._sequences: dict[int, _Sequence] = {}
        self.waiting = 0  # sequences that have not begun

    def add(self, job: Job) -> None:
        """Take a job."""
        self._jobs[job.key], self._left[job.key] = job, job.count
        self.waiting += job.count

    def drop(self, job: Job) -> None:
        """Forget a job. Nothing of it is returned any more."""
        if self._jobs.pop(job.key, None) is not None:
            begun = [number for number, each in self._sequences.items() if each.job is job]
            for number in begun:
                del self._sequences[number]
            self.waiting -= self._left.pop(job.key) - len(begun)

    def __contains__(self, job: Job) -> bool:
        return job.key in self._jobs

    @property
    def running(self) -> int:
        """How many sequences have begun and are not over."""
        return len(self._sequences)

    def take(self, told: Iterable[Told]) -> list[tuple[Job, Event]]:
        """Return what happened to jobs: at most one Made per sequence, with all its new tokens."""
        events: list[tuple[Job, Event]] = []
        new: dict[_Sequence, None] = {}  # sequences with news
        for each in told:
            if isinstance(each, NewTokens):
                self._note_tokens(each, new)
            elif (job := self._jobs.get(each.job)) is not None:
                if isinstance(each, Began):
                    text = TextStream(self._tokenizer, job.options.stop)
                    self._sequences[each.number] = _Sequence(each.number, job, each.sequence, text)
                    self.waiting -= 1
                else:
                    events.append((job, each.event))
                    if isinstance(each.event, Failed):
                        self.drop(job)
        for sequence in new:
            if sequence.number in self._sequences:
                events.append((sequence.job, self._write(sequence)))
        return events

    def _note_tokens(self, made: NewTokens, new: dict[_Sequence, None]) -> None:
        known, tops = self._sequences, made.tops
        for number, token, logprob in zip(made.numbers, made.tokens, made.logprobs, strict=True):
            if (sequence := known.get(number)) is not None:  # it may have ended at a stop string
                sequence.new.append(Scored(token, *tops[number]) if number in tops else Scored(token, logprob, []))
                new[sequence] = None
        for number, reason in made.ended.items():
            if (sequence := known.get(number)) is not None:
                sequence.finish_reason = reason
                new[sequence] = None

    def _write(self, sequence: _Sequence) -> Made | Failed:
        """Return the new tokens of a sequence with their text. If it is over, forget it."""
        job = sequence.job
        try:
            text = self._text(sequence)
            scored, sequence.new = sequence.new, []
            sequence.count += len(scored)
            if sequence.text.stopped:
                if sequence.finish_reason is None:
                    self._stop(sequence.number, sequence.count)
                sequence.finish_reason = "stop"
            if sequence.finish_reason is not None:
                text += sequence.text.finish()
        except Exception as error:  # such as a tokenizer's
            self.drop(job)
            self._cancel(job)
            return Failed("job", f"the next token could not be taken: {short_error(error)}", error)
        if sequence.finish_reason is not None:
            del self._sequences[sequence.number]
            self._left[job.key] -= 1
            if not self._left[job.key]:
                self.drop(job)
        return Made(sequence.sequence, scored, text, sequence.finish_reason)

    def _text(self, sequence: _Sequence) -> str:
        """Return the text of the new tokens up to a stop string, and drop the tokens after it."""
        options, new = sequence.job.options, sequence.new
        if not options.stop:
            return sequence.text.push(*(each.token for each in new if each.token != options.end_of_text))
        text = ""
        for count, each in enumerate(new, 1):
            text += "" if each.token == options.end_of_text else sequence.text.push(each.token)
            if sequence.text.stopped:
                if len(new) > count:
                    sequence.finish_reason = None  # it was that of a later token
                    del new[count:]
                break
        return text


def short_error(error: Exception) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
