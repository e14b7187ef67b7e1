"""Synthetic tasks behind one contract and a register: sequences that ask a model to recall what it has read."""

from rebased.tasks.batches import Batch, Questions, epoch_batches, find_questions
from rebased.tasks.compositional_mqar import CompositionalMQAR
from rebased.tasks.compression import Compression
from rebased.tasks.contract import IGNORE, Examples, Split, Task, register_task, task_class, task_name, task_names
from rebased.tasks.copying import Copying
from rebased.tasks.forgetting_mqar import ForgettingMQAR
from rebased.tasks.fuzzy_recall import FuzzyRecall
from rebased.tasks.memorisation import Memorisation
from rebased.tasks.mqar import MQAR
from rebased.tasks.needle import Needle
from rebased.tasks.ngram_copying import NgramCopying
from rebased.tasks.noisy_recall import NoisyRecall
from rebased.tasks.overwriting import Overwriting
from rebased.tasks.selective_copying import SelectiveCopying
from rebased.tasks.splits import DEFAULT_TASK, AnyTask, Segment, Splits, TaskData, task_data
from rebased.tasks.word_problem import WordProblem

__all__ = [
    "DEFAULT_TASK",
    "IGNORE",
    "MQAR",
    "AnyTask",
    "Batch",
    "CompositionalMQAR",
    "Compression",
    "Copying",
    "Examples",
    "ForgettingMQAR",
    "FuzzyRecall",
    "Memorisation",
    "Needle",
    "NgramCopying",
    "NoisyRecall",
    "Overwriting",
    "Questions",
    "Segment",
    "SelectiveCopying",
    "Split",
    "Splits",
    "Task",
    "TaskData",
    "WordProblem",
    "epoch_batches",
    "find_questions",
    "register_task",
    "task_class",
    "task_data",
    "task_name",
    "task_names",
]
