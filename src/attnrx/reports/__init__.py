"""Reports: diagnosis, prescription and evidence as a self-contained HTML page, and as a model card."""

from attnrx.reports.card import completed_card, model_card
from attnrx.reports.content import AttentionSamples, ComparisonRecord, ReportContent, TokenSamples, TradeOffPoint
from attnrx.reports.page import write_report
from attnrx.reports.ranks import PathwayRanks, model_ranks
from attnrx.reports.samples import sample_attention, sample_tokens

__all__ = [
    "AttentionSamples",
    "ComparisonRecord",
    "PathwayRanks",
    "ReportContent",
    "TokenSamples",
    "TradeOffPoint",
    "completed_card",
    "model_card",
    "model_ranks",
    "sample_attention",
    "sample_tokens",
    "write_report",
]
