import math

import pytest

from experiments import cost_table as costs
from experiments import record, sass
from tests.experiments.running import run


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run("cost_table", tmp_path_factory.mktemp("cost_table"), "--quick")


def test_a_tile_of_the_forward(found):
    (row,), _ = found
    assert (row["kernel"], row["head_dim"], row["mask"], row["device"]) == (costs.FORWARD, 64, costs.NO_MASK, "A100")
    queries, keys = row["block_m"], row["block_n"]
    flops = 2 * 2 * queries * keys * 64
    assert row["hmma"] * row["warps"] * 2 * 16 * 8 * 16 == flops
    assert row["tensor_cycles"] == flops / 2048  # 1024 fused multiply-adds in a cycle
    assert row["exp_cycles"] >= queries * keys / 16
    assert row["issue_cycles"] == row["slots"] * row["warps"] / 4
    assert row["slots_per_hmma"] == pytest.approx(row["slots"] / row["hmma"], rel=1e-5)
    # Each warp reads all keys and values, and the queries of its own, once; 128 bytes in a wavefront.
    rows_read = row["warps"] * 2 * keys + queries
    assert rows_read * 128 * 0.6 <= row["wavefronts"] * 128 <= (rows_read + 2 * keys) * 128
    assert (
        row["shared_cycles"] == row["wavefronts"] == row["ideal_wavefronts"] and not row["excess_wavefronts_elsewhere"]
    )


def test_machine_code_does_at_least_what_the_model_says(found):
    (row,), _ = found
    for unit in costs.MODELLED:
        assert 0 < row[f"least_{unit}_cycles"] <= row[f"{unit}_cycles"], unit


def test_cases():
    cases = costs.cases([*costs.KERNELS], [64, 128, 256], [*costs.MASKS], ["sm_80", "sm_86"])
    assert len(cases) == len(set(cases)) == 3 * 3 * 2 * 2
    for case in cases:
        defines = case.config.defines
        assert (defines["HEAD_DIM"], defines["BAND_RIGHT"]) == (case.head_dim, case.mask == costs.CAUSAL)
        assert case.config.name == case.kernel
        assert defines.get("WITH_DKEY", 1) == defines.get("WITH_DVALUE", 1) == 1  # as the library launches it


@pytest.mark.parametrize("mask", costs.MASKS)
@pytest.mark.parametrize("kernel", [costs.FORWARD, costs.DKDV, costs.DQ])
def test_one_tile_more_is_one_tile_without_a_mask(kernel, mask):
    case = costs.Case(kernel, 64, mask, "sm_80")
    runs = [costs.one_block(case, tiles) for tiles in (1, 2, 3)]
    flops = [run.mma_flops for run in runs]
    tile = 2 * case.config.defines["BLOCK_M"] * case.config.defines["BLOCK_N"] * 64
    assert flops[2] - flops[1] == flops[1] - flops[0] == costs.PRODUCTS[kernel] * tile
    instructions = [run.warp_instructions for run in runs]
    assert all(run.launches == 1 and run.shape.blocks == 1 for run in runs)
    # A mask would cost instructions for each score: all of these tiles cost the same.
    assert instructions[2] - instructions[1] == instructions[1] - instructions[0]


def test_a_unit_is_known_for_each_opcode_or_it_is_refused():
    assert [costs.unit_of(name) for name in ("FFMA", "IADD3", "MUFU", "HMMA", "UIADD3")] == [
        "float", "alu", "exp", None, None,
    ]  # fmt: skip
    with pytest.raises(sass.SassError, match="FNEW"):
        costs.unit_of("FNEW")
    assert not costs.FLOAT & costs.ALU and not costs.ELSEWHERE & (costs.FLOAT | costs.ALU | costs.EXP)


def table(row, **changes):
    """Rows that reach every target; of ``changes`` (kernel, head_dim, arch) -> other values."""
    rows = []
    for kernel in costs.KERNELS:
        for head_dim in (64, 128, 256):
            for arch, device in ("sm_80", "A100"), ("sm_90", "H100"):
                slots = {"slots_per_hmma": 3.0, "slots_per_hmma_at_rest": 2.5, "stack_bytes": 32, "local_in_loop": 0}
                place = {"kernel": kernel, "head_dim": head_dim, "arch": arch, "device": device}
                rows.append({**row, **slots, **place, "share_of_tensor": 0.8})
    for row in rows:
        row.update(changes.get(f"{row['kernel']}_{row['head_dim']}_{row['arch']}", {}))
    return rows


def test_targets_that_are_reached(found):
    outcomes = costs.outcomes(table(found[0][0]))
    assert len(outcomes) == 13 and all(outcome.holds for outcome in outcomes)


def test_the_worse_of_both_masks_counts(found):
    rows = table(found[0][0])
    worse = [row | {"mask": costs.CAUSAL, "slots_per_hmma": 9.0} for row in rows]
    for both in rows + worse, worse + rows:
        missed = [outcome.what for outcome in costs.outcomes(both) if not outcome.holds]
        assert len(missed) == 5 and all("slots" in what for what in missed)


@pytest.mark.parametrize(
    ("place", "change", "what"),
    [
        ("flash_fwd_64_sm_80", {"slots_per_hmma": 4.31}, ["forward, head_dim 64, sm_80"]),
        ("flash_fwd_128_sm_80", {"slots_per_hmma": 3.46}, ["forward, head_dim 128, sm_80"]),
        ("flash_fwd_128_sm_80", {"slots_per_hmma_at_rest": 3.01}, ["forward, head_dim 128, sm_80"]),
        ("flash_fwd_256_sm_80", {"slots_per_hmma": 3.21}, ["forward, head_dim 256, sm_80"]),
        ("flash_fwd_128_sm_90", {"slots_per_hmma": 3.2}, ["forward, slots of sm_90"]),
        ("flash_bwd_dkdv_64_sm_80", {"slots_per_hmma": 4.02}, ["backward, head_dim 64"]),  # (4 * 4.02 + 3 * 3) / 5
        ("flash_bwd_dq_128_sm_80", {"slots_per_hmma": 3.02}, ["backward, head_dim 128"]),  # (4 * 3 + 3 * 3.02) / 5
        ("flash_bwd_dq_256_sm_90", {"local_in_loop": 1}, ["kernels with local memory"]),
        ("flash_bwd_dkdv_256_sm_90", {"stack_bytes": 40}, ["stack of a thread"]),
        ("flash_bwd_dq_64_sm_80", {"wavefronts": 10**6}, ["wavefronts of shared memory"]),
        ("flash_bwd_dq_64_sm_80", {"excess_wavefronts_elsewhere": 1}, ["wavefronts of shared memory"]),
        ("flash_fwd_64_sm_80", {"share_of_tensor": 0.81}, ["forward, head_dim 64, A100"]),
        ("flash_fwd_64_sm_90", {"share_of_tensor": 0.81}, []),
        ("flash_bwd_dq_64_sm_90", {"hmma_counted": 1.0}, ["HMMA of the loop"]),
    ],
)
def test_a_target_that_is_missed_is_said(found, place, change, what):
    missed = [outcome for outcome in costs.outcomes(table(found[0][0], **{place: change})) if not outcome.holds]
    assert [any(outcome.what.startswith(begin) for begin in what) for outcome in missed] == [True] * len(what)
    assert all(len(outcome.note) > 40 for outcome in missed if not outcome.what.startswith(("wavefronts", "HMMA")))


def test_the_committed_table_is_of_one_compiler_and_all_kernels():
    rows, environment = record.read_csv(record.RESULTS / "cost_table.csv")
    assert environment["nvrtc"].split(".")[0].isdigit()
    for name, values in (("device", costs.BOARDS), ("mask", costs.MASKS), ("head_dim", (64, 96, 128, 256))):
        assert {row[name] for row in rows} == set(values)
    assert {*costs.KERNELS} == {row["kernel"] for row in rows}
    assert len({(row["kernel"], row["head_dim"], row["mask"], row["device"]) for row in rows}) == len(rows)
    assert all(math.isfinite(row["share_of_tensor"]) for row in rows)


@pytest.mark.parametrize(
    ("other", "said"), [("shared", "shared memory everywhere"), ("issue", "unless the cell names")]
)
def test_the_figure_names_the_busiest_unit_once_and_exceptions_where_they_are(found, tmp_path, other, said):
    rows = table(found[0][0])
    rows[0]["busiest_beside_tensor"] = other
    with record.figure(tmp_path / "cost_table.csv", (13, 7)) as figure:
        costs.draw(figure, rows)
        shares = figure.axes[1]
        assert said in shares.get_title(loc="left")
        texts = [text.get_text() for text in shares.texts]
    assert texts.count("80%\nissue") == (other == "issue") and not texts.count("80%\nshared")
