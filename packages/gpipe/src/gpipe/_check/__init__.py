"""Whether a model trains the same in micro-batches and stages, and what stands in the way."""

from ._check import check as check
from ._findings import Finding as Finding
from ._report import Report as Report

__all__ = ["Finding", "Report", "check"]
