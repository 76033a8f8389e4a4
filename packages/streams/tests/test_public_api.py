from .fakes import in_fresh_process

FRESH = """
import sys, torch
before = set(sys.modules)
import streams
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
class Mode(streams.DispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return operation(*args, **(kwargs or {})) * 2
with Mode().pushed():
    twos = torch.ones(2)
assert twos.tolist() == [2.0, 2.0]
assert "torch._dynamo" not in sys.modules
"""


def test_importing_it_imports_nothing_that_torch_does_not():
    """A dispatch mode does not import the compiler, which takes seconds."""
    found = in_fresh_process(FRESH)
    assert not found.stderr
    assert set(found.stdout.split()) <= {"streams", "queue", "_queue"}
