"""MemServe: context caching across disaggregated LLM inference (arXiv 2406.17565)."""

__version__ = "0.1.0"
