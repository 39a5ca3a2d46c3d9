"""Whether a student and a teacher can be distilled: turn ends, one prompt's rendering, and what ids mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from divopd_gym.errors import ConfigError

from .chat import ChatCodec

__all__ = ["TokenizerReport", "compare_tokenizers"]

_SYSTEM, _USER = "You act in a text world.", "You are in a room.\n\nYour task: look at the vase."


@dataclass(frozen=True, eq=False)
class TokenizerReport:
    """What differs between two tokenizers.

    Attributes:
        student_end: (id, token) that closes the student's turn.
        teacher_end: The same of the teacher.
        student_prompt: int32 ids of a sample prompt.
        teacher_prompt: The same rendered by the teacher's template and tokenizer.
        first_difference: Position of the first id that differs between the two, or None.
        shared: bool [student vocabulary size]; True where an id means the same token to both.
        differing_share: Share of the student's ids that do not.
        student_size: Ids that the student's tokenizer knows.
        teacher_size: The same of the teacher.
    """

    student_end: tuple[int, str]
    teacher_end: tuple[int, str]
    student_prompt: np.ndarray
    teacher_prompt: np.ndarray
    first_difference: int | None
    shared: np.ndarray
    differing_share: float
    student_size: int
    teacher_size: int

    @property
    def same_end_of_turn(self) -> bool:
        """Whether both close a turn with the same id."""
        return self.student_end == self.teacher_end

    @property
    def same_prompt(self) -> bool:
        """Whether both render the sample prompt to the same ids."""
        return self.first_difference is None

    def mask(self, token_ids: np.ndarray) -> np.ndarray:
        """bool, shaped like `token_ids`: ids that the teacher's score of which can be used.

        Ids beyond the tokenizer (a model's embedding may be padded) cannot.
        """
        ids = np.asarray(token_ids)
        inside = (ids >= 0) & (ids < len(self.shared))
        return inside & self.shared[np.where(inside, ids, 0)]

    def differences(self) -> list[str]:
        """One sentence a difference, for the log."""
        found = []
        if not self.same_end_of_turn:
            found.append(
                f"The student ends a turn with id {self.student_end[0]} ({self.student_end[1]!r}), the teacher "
                f"with id {self.teacher_end[0]} ({self.teacher_end[1]!r})."
            )
        if not self.same_prompt:
            at = self.first_difference
            found.append(
                f"One sample prompt has {len(self.student_prompt)} ids from the student's template and "
                f"{len(self.teacher_prompt)} from the teacher's; the first difference is at position {at}. The "
                "teacher will score the student's rendering."
            )
        if self.differing_share:
            found.append(
                f"{self.differing_share:.2%} of the student's {self.student_size} ids mean something else to the "
                f"teacher ({self.teacher_size} ids) or nothing; tokens with these ids carry no loss."
            )
        return found

    def check(self, max_differing_share: float = 0.01, *, allow_other_end: bool = False) -> list[str]:
        """Refuse a pair that would train on nonsense.

        Args:
            max_differing_share: Refuse above this share of ids that differ.
            allow_other_end: Accept different ends of turn.

        Returns:
            The differences that were let pass, one sentence each.

        Raises:
            ConfigError: With what was found, what was expected and the remedy.
        """
        if self.differing_share > max_differing_share:
            raise ConfigError(
                f"{self.differing_share:.1%} of the student's ids mean something else to the teacher (at most "
                f"{max_differing_share:.1%} expected): their tokenizers differ. Choose a teacher of the student's "
                "family."
            )
        if not self.same_end_of_turn and not allow_other_end:
            raise ConfigError(
                self.differences()[0]
                + " Expected the same, or the teacher scores every end of turn as an accident. "
                "Give both the same chat template, or choose an instruction-tuned student."
            )
        return self.differences()


def compare_tokenizers(student: Any, teacher: Any) -> TokenizerReport:
    """Compare two `transformers` tokenizers as far as distillation cares.

    Raises:
        ConfigError: One of them has no chat template.
    """
    codecs = ChatCodec(student), ChatCodec(teacher)
    prompts = [codec.start(_SYSTEM, _USER) for codec in codecs]
    ends = [
        (codec.end_of_turn_ids[0], str(codec.tokenizer.convert_ids_to_tokens(codec.end_of_turn_ids[0])))
        for codec in codecs
    ]
    length = min(map(len, prompts))
    unequal = np.flatnonzero(prompts[0][:length] != prompts[1][:length])
    if len(unequal):
        first = int(unequal[0])
    else:
        first = None if len(prompts[0]) == len(prompts[1]) else length
    mine, theirs = student.get_vocab(), teacher.get_vocab()
    shared = np.zeros(max(mine.values(), default=-1) + 1, np.bool_)
    for token, token_id in mine.items():
        shared[token_id] = theirs.get(token) == token_id
    return TokenizerReport(
        student_end=ends[0],
        teacher_end=ends[1],
        student_prompt=prompts[0],
        teacher_prompt=prompts[1],
        first_difference=first,
        shared=shared,
        differing_share=1 - float(shared.sum()) / max(1, len(mine)),
        student_size=len(mine),
        teacher_size=len(theirs),
    )
