"""Check whether a model trains in micro-batches and stages as it does without, and find the causes if not."""

from ._check import check as check
from ._findings import Finding as Finding
from ._report import Report as Report

__all__ = ["Finding", "Report", "check"]
