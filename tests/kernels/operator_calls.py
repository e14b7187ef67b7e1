"""Calls of all operators but polynomial attention."""
def calls(): return []
def compare(call, device, limit): raise NotImplementedError
