"""Messages of `WatchRounds`: rounds with their trees, and the service's load."""

from __future__ import annotations

import time
from collections.abc import Mapping

from coppice.core.tokenizer import TargetTokenizer
from coppice.v1 import inference_pb2
from coppice.wire.convert import put_tree
from orchestrator.admission.admission import Admission
from orchestrator.peers.verifier_pool import VerifierPool
from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.request.round_feed import EndedRound
from orchestrator.service_counters import ServiceCounters


def round_report(ended: EndedRound, tokenizer: TargetTokenizer) -> inference_pb2.RoundReport:
    """Report of a round."""
    outcome = ended.outcome
    tree, states = ended.nodes()
    report = inference_pb2.RoundReport(
        request_id=ended.request_id,
        output_index=ended.output_index,
        time_s=ended.time_s,
        base_length=outcome.base_length,
        token_ids=outcome.token_ids,
        tokens=map(tokenizer.token_bytes, outcome.token_ids),
        node_tokens=map(tokenizer.token_bytes, tree.token_ids),
        node_states=states,
        origin=outcome.draft_origin,
        budget=ended.plan.max_nodes,
        row_price=ended.plan.row_price,
        pass_rows=outcome.pass_rows,
        pass_us=outcome.pass_us,
        linger_us=outcome.linger_us,
        round_us=ended.round_us,
    )
    put_tree(tree, report.tree)
    return report


def load_report(
    tally: ServiceCounters, admission: Admission, verifiers: VerifierPool, planners: Mapping[str, AdaptivePlanner]
) -> inference_pb2.LoadReport:
    """The load of this moment."""
    total = tally.statistics()
    plans = [generation.planned_nodes for generation in tally.generations()]
    report = inference_pb2.LoadReport(
        time_s=time.time(),
        running=admission.num_running,
        waiting=admission.num_waiting,
        planned_nodes=sum(plans),
        drafting=sum(map(bool, plans)),
        generated_tokens=tally.num_generated(),
        rounds=total.rounds,
        draft_tokens=total.draft_tokens,
        accepted_tokens=total.accepted_tokens,
    )
    for client in verifiers.clients:
        load, planner = client.load, planners.get(client.address)
        report.verifiers.add(
            batch_size=load.batch_size,
            rows=load.rows,
            pass_us=load.pass_us,
            queued_sequences=load.queued_sequences,
            free_kv_blocks=load.free_kv_blocks,
            row_price=0.0 if planner is None else planner.price,
        )
    return report
