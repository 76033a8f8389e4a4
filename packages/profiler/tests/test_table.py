from profiler import LayerProfile, Profile

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
