"""Digests of plans, and the facts that ranks must agree on before a job may run.

Every rank compiles its plan alone. What it assumes about others is a list of `CrossRankFact`s: one
per register that crosses ranks and one per communicator, with the micro-batches of both. The master
compares them.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from plancompiler.errors import DigestMismatchError, MixedKernelsError
from plancompiler.ir.task import family_of, format_id, rank_of
from plancompiler.plan.plan import Plan, RegisterDesc, RemoteRegister, communicator_of
from plancompiler.plan.text import format_plan, format_shape

_HINT = "all ranks must compile the same job with the same version"
PRODUCER, CONSUMER, MEMBER = "producer", "consumer", "member"
ALLOW_MIXED_KERNELS = "PLANCOMPILER_ALLOW_MIXED_KERNELS"
_SHOWN_RANKS = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CrossRankFact:
    """What one rank takes for granted about something that it shares with others."""

    sync_id: int
    """The id that all ranks know the register by; -1 for a communicator."""
    register: int
    """The register's own id; -1 for a communicator."""
    name: str
    """The value's name; `communicator of ranks …` for a communicator."""
    role: str
    """`producer` or `consumer` of a register, `member` of a communicator."""
    ranks: tuple[int, ...]
    """All ranks that must know of it, ascending."""
    text: str
    """Canonical text: equal on all ranks that agree."""


def text_digest(text: str) -> str:
    """sha256 of a plan's text form, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def plan_digest(plan: Plan) -> str:
    """sha256 of the plan's text form without source lines, in hexadecimal."""
    return text_digest(format_plan(plan, sources=False))


def combine_digests(digests: Mapping[int, str]) -> str:
    """One digest over the plan digests of several ranks, in rank order."""
    lines = [f"{rank} {digest}\n" for rank, digest in sorted(digests.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def digest_of_plans(plans: Mapping[int, Plan]) -> str:
    """One digest over the plans of several ranks, in rank order."""
    return combine_digests({rank: plan_digest(plan) for rank, plan in plans.items()})


def cross_rank_facts(plan: Plan) -> tuple[CrossRankFact, ...]:
    """All that this rank's plan assumes about others: registers by sync id, then communicators."""
    count = plan.microbatches
    facts = [
        _register_fact(register, PRODUCER, count)
        for register in plan.registers
        if register.sync_id != -1 or any(rank_of(task) != plan.rank for task in register.consumers)
    ]
    facts += [_register_fact(register, CONSUMER, count) for register in plan.remote_registers]
    facts.sort(key=lambda fact: (fact.sync_id, fact.name, fact.role))
    orders = collective_orders(plan) if count > 1 else {}
    for index, communicator in enumerate(plan.communicators):
        facts.append(
            CrossRankFact(
                sync_id=-1,
                register=-1,
                name=f"communicator of ranks {communicator.group}",
                role=MEMBER,
                ranks=tuple(sorted(communicator.ranks)),
                text=f"families {', '.join(map(str, communicator.families))}"
                + _order_text(orders.get(index, ()), count),
            )
        )
    return tuple(facts)


def collective_orders(plan: Plan) -> dict[int, tuple[tuple[int, int], ...]]:
    """Communicator → its collectives over the step in order, as (family, micro-batch).

    Segments may be cut differently on members of a communicator; this order must not differ.
    """
    families: dict[int, dict[int, list[int]]] = {}
    for task in plan.tasks:
        used = communicator_of(task.spec)
        if used is not None:
            by_segment = families.setdefault(used, {})
            by_segment.setdefault(task.segment, []).append(family_of(task.id))
    return {
        communicator: tuple(
            (family, microbatch)
            for segment, microbatch in plan.slots
            for family in by_segment.get(segment, ())
        )
        for communicator, by_segment in families.items()
    }


def _order_text(order: Sequence[tuple[int, int]], microbatches: int) -> str:
    """Which micro-batch's collectives follow which: long, so only a short hash of it."""
    if microbatches == 1:
        return ""
    digest = text_digest(" ".join([f"{family}({microbatch})" for family, microbatch in order]))
    return f" of {microbatches} micro-batches in the order {digest[:16]}"


def _register_fact(
    register: RegisterDesc | RemoteRegister, role: str, microbatches: int
) -> CrossRankFact:
    home = rank_of(register.id)
    consumers = sorted(task for task in register.consumers if rank_of(task) != home)
    return CrossRankFact(
        sync_id=register.sync_id,
        register=register.id,
        name=register.name,
        role=role,
        ranks=tuple(sorted({home, *map(rank_of, consumers)})),
        text=(
            f"register {format_id(register.id)} sync {format_id(register.sync_id)}"
            f" {register.dtype}{format_shape(register.shape)}"
            f"{_rate_text(register, microbatches)}"
            f" producer {format_id(register.producer)}"
            f" consumers {', '.join(map(format_id, consumers))}"
        ),
    )


def _rate_text(register: RegisterDesc | RemoteRegister, microbatches: int) -> str:
    if microbatches == 1 and not register.per_microbatch:
        return ""
    each = "each" if register.per_microbatch else "all"
    return f" for {each} of {microbatches} micro-batches"


def check_kernels(kernels_by_rank: Mapping[int, str], allowed: bool | None = None) -> None:
    """Compare what ranks compute with (`numeric_kernels`), as they say it; those that compute
    nothing say nothing.

    Raises MixedKernelsError, which names ranks and kernels, where they differ; where that is
    allowed, by the caller or by PLANCOMPILER_ALLOW_MIXED_KERNELS, it is a warning in the log.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, kernels in sorted(kernels_by_rank.items()):
        if kernels:
            ranks_of.setdefault(kernels, []).append(rank)
    if len(ranks_of) < 2:
        return
    groups = [f"{_ranks_text(ranks)}: {kernels}" for kernels, ranks in ranks_of.items()]
    error = MixedKernelsError(
        "ranks compute with other kernels, whose results differ in their last bits",
        rank=next(islice(ranks_of.values(), 1, None))[0],
        got="; ".join(groups),
        expected="the same on all ranks",
        hint="install the same versions everywhere and set OPENBLAS_CORETYPE to a kernel set that "
        "all hosts have; or allow it with --allow-mixed-kernels or "
        f"{ALLOW_MIXED_KERNELS}=1",
    )
    if allowed is None:
        allowed = os.environ.get(ALLOW_MIXED_KERNELS, "0") not in ("", "0")
    if not allowed:
        raise error
    _log.warning("%s", error)


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def check_cross_rank_facts(facts_by_rank: Mapping[int, Sequence[CrossRankFact]]) -> None:
    """Compare what ranks assume about each other.

    Ranks that are not in the mapping are not asked. Raises DigestMismatchError naming two ranks,
    the value and both texts where they disagree, where a rank reads a register that its producer
    does not know, and where a producer counts a consumer that does not exist.
    """
    told_of: dict[int | str, dict[int, CrossRankFact]] = {}
    for rank, facts in sorted(facts_by_rank.items()):
        for fact in facts:
            told = told_of.setdefault(fact.name if fact.role == MEMBER else fact.register, {})
            if rank in told:
                raise _disagreement(rank, told[rank], rank, fact)
            told[rank] = fact
    registers: dict[int, tuple[int, CrossRankFact]] = {}
    for told in told_of.values():
        first_rank, first = next(iter(told.items()))
        for rank, fact in told.items():
            if fact.text != first.text:
                raise _disagreement(first_rank, first, rank, fact)
            if rank not in fact.ranks:
                raise _unknown(rank, fact, fact.ranks[0])
            if fact.role != MEMBER and (fact.role == PRODUCER) != (rank == rank_of(fact.register)):
                raise _unknown(rank, fact, rank_of(fact.register))
        for rank in first.ranks:
            if rank in facts_by_rank and rank not in told:
                raise _unknown(first_rank, first, rank)
        if first.role != MEMBER:
            other_rank, other = registers.setdefault(first.sync_id, (first_rank, first))
            if other.register != first.register:
                raise _disagreement(other_rank, other, first_rank, first)


def _disagreement(
    rank: int, fact: CrossRankFact, other_rank: int, other: CrossRankFact
) -> DigestMismatchError:
    return DigestMismatchError(
        f"ranks {rank} ({fact.role}) and {other_rank} ({other.role}) disagree about {fact.name!r}",
        rank=other_rank,
        got=f"rank {other_rank} says: {other.name!r}, {other.text}",
        expected=f"what rank {rank} says: {fact.name!r}, {fact.text}",
        hint=_HINT,
    )


def _unknown(rank: int, fact: CrossRankFact, other_rank: int) -> DigestMismatchError:
    return DigestMismatchError(
        f"rank {rank} ({fact.role}) counts on rank {other_rank} for {fact.name!r}, "
        "which does not know of it",
        rank=other_rank,
        got=f"nothing from rank {other_rank}",
        expected=f"what rank {rank} says: {fact.text}",
        hint=_HINT,
    )
