# SPDX-License-Identifier: Apache-2.0
"""Which MMLU subjects make which client: FedNL's five (arXiv 2605.16350, Table 3).

The paper names groups of subjects by substrings; here they are explicit lists, as "history" would
also match prehistory.  Three of the 57 subjects are in no group of the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedloom.data.questions import Question
from fedloom.errors import Refusal, nearest

CLIENTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Law/Ethics",
        (
            "professional_law",
            "moral_scenarios",
            "moral_disputes",
            "logical_fallacies",
            "formal_logic",
            "international_law",
            "jurisprudence",
            "business_ethics",
        ),
    ),
    (
        "Humanities",
        (
            "miscellaneous",
            "high_school_european_history",
            "high_school_us_history",
            "high_school_world_history",
            "prehistory",
            "high_school_government_and_politics",
            "high_school_macroeconomics",
            "high_school_microeconomics",
            "high_school_geography",
            "sociology",
            "philosophy",
            "world_religions",
            "management",
            "marketing",
            "public_relations",
            "security_studies",
            "global_facts",
        ),
    ),
    (
        "STEM",
        (
            "elementary_mathematics",
            "college_biology",
            "high_school_biology",
            "college_chemistry",
            "high_school_chemistry",
            "college_physics",
            "high_school_physics",
            "conceptual_physics",
            "astronomy",
            "anatomy",
            "electrical_engineering",
        ),
    ),
    (
        "Math/CS",
        (
            "high_school_mathematics",
            "high_school_statistics",
            "machine_learning",
            "college_mathematics",
            "high_school_computer_science",
            "college_computer_science",
            "computer_security",
            "abstract_algebra",
        ),
    ),
    (
        "Med/Psych",
        (
            "professional_psychology",
            "high_school_psychology",
            "virology",
            "nutrition",
            "professional_medicine",
            "clinical_knowledge",
            "human_aging",
            "college_medicine",
            "human_sexuality",
            "medical_genetics",
        ),
    ),
)
"""Partition ids 0 to 4: name and subjects."""

LEFT_OUT = ("professional_accounting", "econometrics", "us_foreign_policy")
"""MMLU subjects that no client holds."""


def by_client(
    questions: Iterable[Question], clients: Sequence[tuple[str, tuple[str, ...]]] = CLIENTS
) -> list[list[Question]]:
    """Deal questions out to clients by subject.

    Raises
    ------
    Refusal
        For a subject that neither a client nor MMLU has.
    """
    owner = {subject: index for index, (_, group) in enumerate(clients) for subject in group}
    held: list[list[Question]] = [[] for _ in clients]
    for question in questions:
        if question.subject in owner:
            held[owner[question.subject]].append(question)
        elif question.subject not in LEFT_OUT:
            hint = nearest(question.subject, [*owner, *LEFT_OUT])
            raise Refusal(f'subject "{question.subject}"{hint}: expected one of MMLU\'s 57')
    return held
