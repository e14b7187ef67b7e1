"""The selective scan of Mamba (S6)."""

from rebased.ops.scan.api import selective_scan, selective_scan_extend

__all__ = ["selective_scan", "selective_scan_extend"]
