"""The plan verifier: the rules that a plan, and a set of plans, must keep.

Read the two tables as the specification; each rule is one function. A rule may rely on those above
it. All are linear in the plan's size (but for logarithms of sorting).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from plancompiler.plan import rules_memory as memory
from plancompiler.plan import rules_overlap as overlap
from plancompiler.plan import rules_ranks as ranks
from plancompiler.plan import rules_registers as registers
from plancompiler.plan import rules_schedule as schedule
from plancompiler.plan import rules_segments as segments
from plancompiler.plan import rules_tasks as tasks
from plancompiler.plan.index import PlanIndex
from plancompiler.plan.plan import Plan
from plancompiler.plan.rules_ranks import PlansIndex


class PlanRule(NamedTuple):
    """A rule about one plan."""

    says: str
    check: Callable[[PlanIndex], None]


class PlansRule(NamedTuple):
    """A rule about the plans of several ranks."""

    says: str
    check: Callable[[PlansIndex], None]


PLAN_RULES = (
    # Structure: names resolve, in both directions.
    PlanRule("ids are unique and of their rank", registers.check_ids),
    PlanRule("all that is named exists", registers.check_references),
    PlanRule("plan order is segment by segment", segments.check_segments),
    PlanRule("slots run micro-batch after micro-batch", segments.check_slots),
    PlanRule("a register has one producer", registers.check_producers),
    PlanRule("producers come before readers", registers.check_plan_order),
    PlanRule("a register lists exactly its readers", registers.check_consumers),
    PlanRule("control registers carry no data", registers.check_controls),
    PlanRule("registers that cross ranks have their sync id", registers.check_sync_ids),
    # Segments and slots.
    PlanRule("what is read has been made as often", segments.check_rates),
    PlanRule("segments end when all their streams do", segments.check_segment_ends),
    PlanRule("slots suffice for the micro-batches in between", segments.check_register_counts),
    # Tasks: shapes fit what is done.
    PlanRule("a task has the spec of its kind", tasks.check_specs),
    PlanRule("ops compute on their registers' boxes", tasks.check_boxes),
    PlanRule("micro-batches take equal pieces", segments.check_pieces),
    PlanRule("communicators list their collectives in plan order", tasks.check_communicators),
    PlanRule("collectives fit their registers", tasks.check_collectives),
    PlanRule("slices cover their output once", tasks.check_slices),
    PlanRule("copies read inside the remote register", tasks.check_copies),
    PlanRule("outputs are read by output tasks", tasks.check_outputs),
    # Memory.
    PlanRule("registers fit their block", memory.check_sizes),
    PlanRule("variables are their shard and are kept", memory.check_variables),
    PlanRule("memory is aliased from an input", memory.check_aliased_inputs),
    PlanRule("only dead values are overwritten", memory.check_overwriting),
    PlanRule("registers alive at once are disjoint", overlap.check_overlap),
)

PLANS_RULES = (
    PlansRule("plans are of one job", ranks.check_same_job),
    PlansRule("every receive has its send", ranks.check_receives),
    PlansRule("every send has its receive", ranks.check_sends),
    PlansRule("members run collectives in one order", ranks.check_collective_order),
    PlansRule("members agree about each collective", ranks.check_same_collectives),
    PlansRule("nothing waits in a circle", ranks.check_no_circle),
    PlansRule("collectives of all streams come in one order", ranks.check_launch_order),
    PlansRule("readers on other ranks run as often", schedule.check_rates_across),
    PlansRule("the step runs to its end", schedule.check_slots_finish),
    PlansRule("remote readers come before overwriting", ranks.check_remote_readers),
)


def verify_plan(plan: Plan) -> None:
    """Check one rank's plan on its own.

    Raises VerifyError (MemoryOverlapError for shared bytes) naming the rule, the tasks at both
    sides, the rank, what was got and expected, and the tasks around. What other ranks do is not
    known here: see `verify_plans`, and `check_cross_rank_facts` where no one has all plans.
    """
    index = PlanIndex(plan)
    for rule in PLAN_RULES:
        index.rule = rule.says
        rule.check(index)


def verify_plans(plans: Mapping[int, Plan]) -> None:
    """Check plans, by rank, against each other; each should have passed `verify_plan`.

    Where plans of some ranks are missing, rules about those ranks are left out. Raises VerifyError
    naming both ranks, or DeadlockError with one circle of waiting tasks.
    """
    index = PlansIndex(plans)
    try:
        for rule in PLANS_RULES:
            index.rule = rule.says
            for one in index.ranks.values():
                one.rule = rule.says
            rule.check(index)
    except (LookupError, StopIteration):
        # A name that leads nowhere: one plan is broken by itself, and its own rules say how.
        for plan in plans.values():
            verify_plan(plan)
        raise
