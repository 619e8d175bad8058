"""Reports, which show diagnosis, prescription and evidence as a self-contained HTML page or as a model card."""

from attnrx.show.reports.page import ReportContent, is_unedited, model_card, render, write_report
from attnrx.show.reports.results import evidence_stem, files_table, summary_of, written_files
from attnrx.show.reports.samples import MapSamples, TokenSamples, first_images, sample_maps, sample_tokens

__all__ = [
    "MapSamples", "ReportContent", "TokenSamples", "evidence_stem", "files_table", "first_images", "is_unedited",
    "model_card", "render", "sample_maps", "sample_tokens", "summary_of", "write_report", "written_files",
]  # fmt: skip
