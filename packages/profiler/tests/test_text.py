from profiler import LayerProfile, Profile
from profiler.text import format_bytes, format_flops, format_seconds, format_share


def test_three_digits():
    assert [format_bytes(n) for n in (0, 1, 12.5, 1023, 1024, 10 * 1024, 2**20 - 1, 2**60)] == [
        "0 B", "1 B", "12.5 B", "1023 B", "1.00 KiB", "10.0 KiB", "1.00 MiB", "1024 PiB",
    ]  # fmt: skip
    assert [format_flops(n) for n in (0, 999, 999.7, 1500, 12e9)] == ["0", "999", "1.00 k", "1.50 k", "12.0 G"]
    assert [format_seconds(s) for s in (0, 1e-7, 0.25, 90)] == ["0 s", "100 ns", "250 ms", "90.0 s"]
    assert [format_share(s) for s in (0, 3 / 11, 1)] == ["0.0 %", "27.3 %", "100.0 %"]


TWO = Profile(
    layers=(
        LayerProfile("conv", "Conv2d", 1.5e-3, 3e-3, 1024, 1024, 0, 2**20, 2**20, 2**21, 2_000_000),
        LayerProfile("head", "Linear", 2e-5, 4e-9, 4096, 0, 8, 40, 40, 80, 100),
    ),
    device="cpu",
    torch="2.13.0",
    threads=1,
    chunks=4,
    rows=8,
    rounds=12,
)

TABLE = """\
2 layers on cpu, micro-batch of 8 rows (chunks=4), median of 12 rounds
layer  type     forward  backward  parameters  buffers      saved     output       peak    FLOPs
────────────────────────────────────────────────────────────────────────────────────────────────
conv   Conv2d  *1.50 ms  *3.00 ms    2.00 KiB      0 B  *1.00 MiB  *1.00 MiB  *2.00 MiB  *2.00 M
head   Linear   20.0 µs      4 ns   *4.00 KiB     *8 B       40 B       40 B       80 B      100
total           1.52 ms   3.00 ms    6.00 KiB      8 B   1.00 MiB                         2.00 M
* the largest of its column"""


def test_a_table():
    assert str(TWO) == TABLE
