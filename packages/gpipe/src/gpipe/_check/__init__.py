"""Check that a model trains in a pipeline as it does without one, and locate any differences."""

from ._check import check as check
from ._findings import Finding as Finding
from ._report import Report as Report

__all__ = ["Finding", "Report", "check"]
