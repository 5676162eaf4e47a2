"""Agreement between ranks: votes, the protocol, and what carries it."""

from __future__ import annotations

from .agreements import Agreement, AgreementBook, GraphKey
from .common_order import CommonOrder
from .consensus import reconcile
from .differences import encode_nodes, find_difference
from .lockstep import Measurer, agree_on_costs, agree_on_machine
from .memory import run_in_memory, run_loopback
from .messages import Commitment, Proposal, decode_each, decode_votes, encode_vote
from .negotiation import Decide, Share, meet, share_distinct, share_explained
from .peer_skeleton import Alignment, PeerEntry, PeerSkeleton, align
from .scopes import connected_scopes, one_sided
from .store import StoreExchange
from .votes import Mode, ModeDecision, Vote

__all__ = [
    "Agreement",
    "AgreementBook",
    "Alignment",
    "Commitment",
    "CommonOrder",
    "Decide",
    "GraphKey",
    "Measurer",
    "Mode",
    "ModeDecision",
    "PeerEntry",
    "PeerSkeleton",
    "Proposal",
    "Share",
    "StoreExchange",
    "Vote",
    "agree_on_costs",
    "agree_on_machine",
    "align",
    "connected_scopes",
    "decode_each",
    "decode_votes",
    "encode_nodes",
    "encode_vote",
    "find_difference",
    "meet",
    "one_sided",
    "reconcile",
    "run_in_memory",
    "run_loopback",
    "share_distinct",
    "share_explained",
]
