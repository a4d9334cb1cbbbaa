"""The command line on real files: results are attention's own; every error is one line and leaves nothing behind."""

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import time

import ml_dtypes
import numpy as np
import pytest

import kernels_cu
from cupyflash import _launch, _source, attention, attention_backward, naive, ptxsim
from cupyflash.__main__ import main
from cupyflash._cli import device
from cupyflash._cli.progress import progress_bar
from cupyflash.demo import activations, planted_fault

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
#: e_machine and, in the low bytes of e_flags, the compute capability of a cubin (ELF header of the CUDA toolchain).
EM_CUDA, FLAGS_OFFSET = 190, 48


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with q.npy, k.npy and v.npy in it (two heads, seven queries, five keys)."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, shape in ("q", (2, 7, 16)), ("k", (2, 5, 16)), ("v", (2, 5, 8)):
        np.save(f"{name}.npy", rng.standard_normal(shape).astype(np.float16))
    return tmp_path


def saved():
    return [np.load(f"{name}.npy") for name in "qkv"]


def attend(*arguments):
    return main(["attend", *arguments, "--device", "simulator"])


FILES = ("q.npy", "k.npy", "v.npy")


def test_npy_files_in_and_out(folder, capsys):
    assert attend(*FILES, "-o", "out.npy", "--lse", "lse.npy") == 0
    out, lse = attention(*saved(), return_lse=True)
    assert np.load("out.npy").dtype == np.float16
    np.testing.assert_array_equal(np.load("out.npy"), out)
    np.testing.assert_array_equal(np.load("lse.npy"), lse)
    said = capsys.readouterr()
    assert "in the simulator, as sm_80" in said.out and "out.npy: out (2, 7, 8) float16" in said.out
    assert said.err == ""


def test_each_array_of_an_npz_is_said_with_its_own_shape_and_dtype(folder, capsys):
    assert attend(*FILES, "-o", "out.npz") == 0
    assert capsys.readouterr().out.endswith("out.npz: out (2, 7, 8) float16, lse (2, 7) float32\n")


def test_npz_files_in_and_out_with_options(folder):
    q, k, v = saved()
    np.savez("in.npz", queries=q, keys=k, values=v)
    options = ("--causal", "--align", "top-left", "--softmax-scale", "-0.25", "--arch", "sm_75")
    assert attend("in.npz", "--names", "queries", "keys", "values", *options, "-o", "result.npz") == 0
    with ptxsim.settings(arch="sm_75"):
        out, lse = attention(q, k, v, causal=True, align="top-left", softmax_scale=-0.25, return_lse=True)
    with np.load("result.npz") as result:
        np.testing.assert_array_equal(result["out"], out)
        np.testing.assert_array_equal(result["lse"], lse)


@pytest.mark.parametrize("stored", [np.float32, np.float64, ">f4"])
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32)])
def test_other_floats_are_cast_when_asked(folder, stored, dtype):
    arrays = [x.astype(stored) for x in saved()]
    for name, array in zip(FILES, arrays, strict=True):
        np.save(name, array)
    assert attend(*FILES, "--dtype", dtype.name, "-o", "out.npy") == 0
    out = attention(*(x.astype(dtype) for x in arrays))
    np.testing.assert_array_equal(np.load("out.npy"), out.astype(np.float32) if dtype == BFLOAT16 else out)


@pytest.mark.parametrize("stored", [np.float32, ">f8"])
def test_arrays_keep_their_dtype(folder, stored):
    arrays = [x.astype(stored) for x in saved()]
    for name, array in zip(FILES, arrays, strict=True):
        np.save(name, array)
    assert attend(*FILES, "-o", "out.npy", "--lse", "lse.npy") == 0
    out, lse = attention(*(x.astype(x.dtype.newbyteorder("=")) for x in arrays), return_lse=True)
    for name, expected in ("out.npy", out), ("lse.npy", lse):
        assert np.load(name).dtype == expected.dtype
        np.testing.assert_array_equal(np.load(name), expected)


def test_bfloat16_as_numpy_saves_it(folder):
    arrays = [x.astype(BFLOAT16) for x in saved()]
    for name, array in zip(FILES, arrays, strict=True):
        np.save(name, array)
        assert np.load(name).dtype == np.dtype("V2")
    out = attention(*arrays)
    assert attend(*FILES, "--dtype", "bfloat16", "-o", "out.npy") == 0
    assert attend(*FILES, "--dtype", "bfloat16", "--raw-bfloat16", "-o", "raw.npy") == 0
    assert np.load("out.npy").dtype == np.float32
    np.testing.assert_array_equal(np.load("out.npy"), out.astype(np.float32))
    np.testing.assert_array_equal(np.load("raw.npy").view(BFLOAT16), out)


def test_an_output_is_replaced_and_readable_as_other_files_are(folder):
    (folder / "out.npy").write_bytes(b"old")
    assert attend(*FILES, "-o", "out.npy") == 0
    np.testing.assert_array_equal(np.load("out.npy"), attention(*saved()))
    assert (folder / "out.npy").stat().st_mode == (folder / "q.npy").stat().st_mode


def test_a_linked_output_keeps_its_link(folder):
    (folder / "elsewhere").mkdir()
    (folder / "out.npy").symlink_to("elsewhere/out.npy")
    assert attend(*FILES, "-o", "out.npy") == 0
    assert (folder / "out.npy").is_symlink() and (folder / "elsewhere" / "out.npy").is_file()


def prepare_errors(folder):
    """Files that cannot be used, beside the good ones."""
    q, k, v = saved()
    np.save("float32.npy", q.astype(np.float32))
    np.save("large.npy", np.full(q.shape, 1e5, np.float32))
    np.save("int.npy", q.astype(np.int64))
    np.save("opaque.npy", q.view("V2"))
    np.save("narrow.npy", k[..., :15])
    np.save("flat.npy", q.ravel())
    np.save("object.npy", np.array([{}]), allow_pickle=True)
    np.savez("in.npz", q=q, k=k, v=v)
    (folder / "cut.npy").write_bytes((folder / "q.npy").read_bytes()[:-9])
    (folder / "cut.npz").write_bytes((folder / "in.npz").read_bytes()[:-90])
    (folder / "text.npy").write_text("not an array")
    (folder / "header.npy").write_bytes((folder / "q.npy").read_bytes().replace(b"}", b"{"))
    (folder / "empty.npy").touch()
    (folder / "folder.npy").mkdir()


BAD_ATTENDS = [
    ("missing.npy k.npy v.npy -o out.npy", "missing.npy: No such file"),
    ("folder.npy k.npy v.npy -o out.npy", "folder.npy: Is a directory"),
    ("text.npy k.npy v.npy -o out.npy", "text.npy: not a readable"),
    ("empty.npy k.npy v.npy -o out.npy", "empty.npy: not a readable"),
    ("cut.npy k.npy v.npy -o out.npy", "cut.npy: not a readable"),
    ("object.npy k.npy v.npy -o out.npy", "object.npy: not a readable"),
    ("cut.npz -o out.npy", "cut.npz: not a readable"),
    ("header.npy k.npy v.npy -o out.npy", "header.npy: not a readable"),
    ("q.npy -o out.npy", "q.npy: is one array"),
    ("q.npy k.npy -o out.npy", "2 input files"),
    ("in.npz k.npy v.npy -o out.npy", "in.npz: is an .npz archive"),
    ("in.npz --names q k values -o out.npy", "no array 'values' in it, but q, k, v"),
    ("q.npy k.npy v.npy --names q k v -o out.npy", "--names: names arrays of an .npz"),
    ("q.npy narrow.npy v.npy -o out.npy", "k: head_dim 15, but q has 16"),
    ("flat.npy k.npy v.npy -o out.npy", "q: needs at least 2 dimensions"),
    ("q.npy q.npy v.npy -o out.npy", "v: seqlen_k 5, but k has 7"),
    ("q.npy k.npy v.npy --causal -o out.npy", "align: a causal mask"),
    ("float32.npy k.npy v.npy -o out.npy", "k: dtype float16, but q has float32"),
    ("int.npy k.npy v.npy --dtype float16 -o out.npy", "int.npy (q): dtype int64"),
    ("large.npy k.npy v.npy --dtype float16 -o out.npy", "large.npy (q): 224 finite values are too large for float16"),
    ("opaque.npy k.npy v.npy -o out.npy", "opaque.npy (q): elements are two opaque bytes"),
    ("opaque.npy k.npy v.npy --dtype float16 -o out.npy", "opaque.npy (q): elements are two opaque bytes"),
    ("q.npy k.npy v.npy --dtype bfloat16 --arch sm_75 -o out.npy", "bfloat16 needs sm_80"),
    ("q.npy k.npy v.npy --softmax-scale inf -o out.npy", "softmax_scale: inf is not finite"),
    ("q.npy k.npy v.npy --softmax-scale wide -o out.npy", "invalid float value: 'wide'"),
    ("q.npy k.npy v.npy --dtype int8 -o out.npy", "--dtype: invalid choice: 'int8'"),
    ("q.npy k.npy v.npy --align middle -o out.npy", "--align: invalid choice: 'middle'"),
    ("q.npy k.npy v.npy --arch sm_1 -o out.npy", "--arch: invalid choice"),
    ("q.npy k.npy v.npy --raw-bfloat16 -o out.npy", "--raw-bfloat16: the result is float16"),
    ("q.npy k.npy v.npy --dt float16 -o out.npy", "unrecognized arguments: --dt"),
    ("q.npy k.npy v.npy --wrong -o out.npy", "unrecognized arguments: --wrong"),
    ("q.npy k.npy v.npy", "required: -o/--output"),
    ("q.npy k.npy v.npy -o folder.npy", "folder.npy: is a directory"),
    ("q.npy k.npy v.npy -o nowhere/out.npy", "nowhere/out.npy: there is no directory"),
    ("q.npy k.npy v.npy -o text.npy/out.npy", "text.npy/out.npy: there is no directory"),
    ("q.npy k.npy v.npy -o /dev/null", "/dev/null: is not a regular file"),
    ("q.npy k.npy v.npy -o out.csv", "out.csv: the output's name must end in .npy or .npz"),
    ("q.npy k.npy v.npy -o q.npy", "q.npy: is an input and an output"),
    ("q.npy k.npy v.npy -o out.npy --lse out.npy", "--lse out.npy: is the output for out"),
    ("q.npy k.npy v.npy -o out.npy --lse lse.npz", "--lse lse.npz: the name must end in .npy"),
    ("q.npy k.npy v.npy -o out.npz --lse lse.npy", "--lse lse.npy: out.npz holds lse already"),
    ("q.npy k.npy v.npy -o out.npy --lse nowhere/lse.npy", "nowhere/lse.npy: there is no directory"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ATTENDS, ids=[message for _, message in BAD_ATTENDS])
def test_bad_attend(folder, capsys, arguments, message):
    prepare_errors(folder)
    check_error(folder, capsys, ["attend", *arguments.split()], message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "required: COMMAND"),
        ("attention", "invalid choice: 'attention'"),
        ("cubin flash_bwd -o x", "invalid choice: 'flash_bwd'"),
        ("cubin flash_fwd", "required: -o/--output"),
        ("cubin flash_fwd --head-dim 257 -o x", "--head-dim: 257 is not between 1 and 256"),
        ("cubin flash_fwd --head-dim 64 --head-dim-v 0 -o x", "--head-dim-v: 0 is not between"),
        ("cubin flash_fwd --dtype float32 -o x", "--dtype float32 is not one of float16, bfloat16"),
        ("cubin flash_fwd_fma -o x", "--dtype float16 is not one of float32, float64, which flash_fwd_fma takes"),
        ("cubin flash_bwd_dq_fma --dtype bfloat16 -o x", "--dtype bfloat16 is not one of float32, float64"),
        ("cubin flash_fwd --dtype bfloat16 --arch sm_75 -o x", "--dtype bfloat16 needs sm_80"),
        ("ptx strided_copy --head-dim 64", "--head-dim: strided_copy has no variants of it"),
        ("ptx attention_naive --causal", "--causal: attention_naive has no variants of it"),
        ("ptx row_sum --head-dim 64", "--head-dim: row_sum has no variants of it"),
        ("cubin flash_bwd_dbias --dtype float64 -o x", "--dtype float64 is not one of float16, bfloat16"),
        ("cubin flash_combine --dtype bfloat16 --arch sm_75 -o x", "--dtype bfloat16 needs sm_80"),
        ("ptx attention_naive --negative-scale", "--negative-scale: attention_naive has no"),
        ("source flash_fwd -o folder.npy", "folder.npy: is a directory"),
        ("source flash_fwd -o nowhere/x.cu", "nowhere/x.cu: there is no directory"),
        ("demo --device abacus", "--device: invalid choice"),
    ],
)
def test_bad_command(folder, capsys, arguments, message):
    prepare_errors(folder)
    check_error(folder, capsys, arguments.split(), message)


def check_error(folder, capsys, arguments, message):
    before = sorted(folder.iterdir())
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("cupyflash: error: ") and said.err.count("\n") == 1
    assert message in said.err
    assert sorted(folder.iterdir()) == before


def test_a_gpu_that_is_not_there(folder, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["attend", *FILES, "--device", "gpu", "-o", "out.npy"]) == 2
    assert "--device gpu: no usable GPU" in capsys.readouterr().err
    assert not (folder / "out.npy").exists()


def test_a_gpu_is_used_where_there_is_one(folder, capsys, monkeypatch):
    class Cuda:
        class Device:
            id, compute_capability = 0, "90"

        class runtime:
            getDeviceProperties = staticmethod(lambda device_id: {"name": b"NVIDIA H200"})

    moved = []

    class Cupy:
        cuda = Cuda
        asarray = staticmethod(lambda array: moved.append(array.shape) or array)
        asnumpy = staticmethod(np.asarray)

    monkeypatch.setattr(device, "_usable_cupy", lambda: (Cupy, ""))
    assert main(["attend", *FILES, "-o", "out.npy"]) == 0
    assert "on NVIDIA H200, sm_90" in capsys.readouterr().out and moved == [(2, 7, 16), (2, 5, 16), (2, 5, 8)]
    assert main(["attend", *FILES, "-o", "out.npy", "--arch", "sm_80"]) == 0
    assert "in the simulator, as sm_80" in capsys.readouterr().out
    (folder / "out.npy").unlink()
    check_error(
        folder, capsys, ["attend", *FILES, "-o", "out.npy", "--device", "gpu", "--arch", "sm_80"], "--arch sm_80"
    )


def test_a_missing_compiler_is_named(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    check_error(folder, capsys, ["cubin", "strided_copy", "-o", "x.cubin"], 'pip install "cupyflash[cuda13]"')


def test_a_failing_write_leaves_nothing(folder, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    before = sorted(folder.iterdir())
    assert attend(*FILES, "-o", "out.npy", "--lse", "lse.npy") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


@pytest.fixture
def sigint_is_handled():
    """Also where the tests run in a shell's background, which ignores it and hands that on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_leaves_nothing(folder, sigint_is_handled):
    np.save("long.npy", np.zeros((64, 4096, 64), np.float16))
    before = sorted(folder.iterdir())
    command = [sys.executable, "-m", "cupyflash", "attend", *["long.npy"] * 3, "--device", "simulator", "-o", "o.npy"]
    terminal, inside = os.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with subprocess.Popen(command, stderr=inside) as process, os.fdopen(terminal, "rb", buffering=0) as shown:
        os.close(inside)
        said = shown.read(1024)  # the progress bar: at work for more than a second
        assert b"attention" in said
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # how the end of a terminal reads
            while more := shown.read(1024):
                said += more
    assert process.returncode == 130
    assert said.endswith(b"cupyflash: interrupted, nothing written\r\n")
    assert sorted(folder.iterdir()) == before


def test_the_module_runs_and_sets_the_exit_status(folder):
    done = subprocess.run([sys.executable, "-m", "cupyflash", "kernels"], capture_output=True, text=True)
    assert done.returncode == 0 and "flash_fwd" in done.stdout
    done = subprocess.run([sys.executable, "-m", "cupyflash", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


def test_progress_only_on_long_work(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("short"), ptxsim.settings() as settings:
        settings.progress(1, 2)
        settings.progress(2, 2)
    assert capsys.readouterr().err == ""
    with progress_bar("long"), ptxsim.settings() as settings:
        settings.progress(1, 4)
        settings.progress(4, 4)
        settings.progress(1, 8)  # a second launch
        time.sleep(1.7)
    assert "long:" in (said := capsys.readouterr().err) and "1/8" in said


def test_a_log_holds_no_progress(capsys):
    with progress_bar("long"), ptxsim.settings() as settings:
        settings.progress(1, 4)
        settings.progress(1, 8)
        time.sleep(1.7)
    assert capsys.readouterr().err == ""


#: Kernels with head dimensions among their constants, which have twins for float32 and float64.
TILED = ("flash_fwd", "flash_bwd_dkdv", "flash_bwd_dq", "flash_bwd_dbias")


def kernel_text(command, *arguments):
    assert main([command, *arguments, "-o", "text"]) == 0
    with open("text") as file:
        return file.read()


def test_source_is_what_calls_compile(folder, monkeypatch):
    rendered = []
    original = _source.render

    def render(*variant):
        rendered.append(original(*variant))
        return rendered[-1]

    monkeypatch.setattr(_source, "render", render)
    q, v = np.zeros((3, 50), np.float16), np.zeros((3, 20), np.float16)
    attention(q, q, v, causal=True, softmax_scale=-1)
    naive.attention(q, q, v)
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    shape = ("--head-dim", "50", "--head-dim-v", "20", "--causal", "--negative-scale")
    written = {
        kernel_text("source", "flash_fwd", *shape),
        kernel_text("source", "attention_naive"),
        kernel_text("source", "strided_copy"),
    }
    assert written == set(rendered)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_every_kernel_has_a_source_that_calls_compile(folder, monkeypatch, dtype):
    launched = []
    monkeypatch.setattr(_launch.Simulator, "launch", lambda _, launch: launched.append(launch.config))
    q, v, ones = np.ones((3, 51), dtype), np.ones((3, 21), dtype), np.ones((3, 3), dtype)
    lse = np.zeros(3, np.float64 if dtype == "float64" else np.float32)
    attention(q, q, v)
    attention(q, q, v, split_size=128)
    for options in {}, {"bias": ones}, {"alibi_slopes": np.ones((), dtype)}:
        attention_backward(v, q, q, v, v, lse, **options)
    naive.attention(q, q, v)
    naive.attention_backward(v, q, q, v, v, lse)
    sources = {_source.render(config.file, config.defines) for config in launched}
    for kernel in kernels_cu.CATALOGUE:
        tiled = kernel.removesuffix("_fma") in TILED
        if tiled and kernel.endswith("_fma") != (dtype == "float64"):
            continue
        shape = ("--head-dim", "51", "--head-dim-v", "21") if tiled else ()
        assert kernel_text("source", kernel, "--dtype", dtype, *shape) in sources, kernel


def test_ptx_is_what_the_simulator_executes(folder, capsys):
    assert main(["ptx", "flash_fwd", "--dtype", "bfloat16", "--arch", "sm_90"]) == 0
    ptx = capsys.readouterr().out
    assert ".target sm_90" in ptx and ".visible .entry flash_fwd" in ptx and "bf16" in ptx and "ex2.approx.ftz" in ptx
    assert kernel_text("ptx", "flash_fwd", "--dtype", "bfloat16", "--arch", "sm_90") == ptx


@pytest.mark.parametrize(
    ("kernel", "target"),
    [
        ("flash_fwd", "sm_75"),
        ("flash_fwd", "sm_120"),
        ("strided_copy", "sm_80"),
        ("flash_bwd_delta", "sm_75"),
        ("flash_bwd_dkdv", "sm_75"),
        ("flash_bwd_dq", "sm_120"),
        ("flash_bwd_dbias", "sm_90"),
        ("flash_combine", "sm_80"),
        ("row_sum", "sm_75"),
    ],
)
def test_cubin_is_machine_code_for_its_architecture(folder, kernel, target):
    assert main(["cubin", kernel, "--arch", target, "-o", "kernel.cubin"]) == 0
    data = (folder / "kernel.cubin").read_bytes()
    assert data[:4] == b"\x7fELF" and int.from_bytes(data[18:20], "little") == EM_CUDA
    flags = int.from_bytes(data[FLAGS_OFFSET : FLAGS_OFFSET + 4], "little")
    assert int(target[3:]) in (flags & 0xFF, flags >> 8 & 0xFF)
    # The program headers come last in a cubin: the file must hold them whole.
    offset, size, count = (int.from_bytes(data[i : i + n], "little") for i, n in ((32, 8), (54, 2), (56, 2)))
    assert offset + size * count == len(data)
    assert kernel.encode() in data


def test_demo_sections(folder, capsys, monkeypatch):
    from cupyflash.demo import traffic

    monkeypatch.setattr(traffic, "SEQLENS", (128,))
    assert main(["demo", "--device", "simulator"]) == 0
    said = capsys.readouterr().out
    assert "in the simulator, as sm_80" in said and len(said.splitlines()) <= 45
    assert [line.split()[:4] for line in said.splitlines() if line.startswith("      128")] == [
        ["128", "192", "64", "3.0x"]
    ]


def test_the_planted_fault_is_far_beyond_the_bound_and_does_not_stay():
    lines = list(planted_fault.report())
    assert "0 of 1,548 rows beyond" in lines[1] and "0 of 1,548 rows beyond" not in lines[2]
    with pytest.raises(ValueError, match="occurs 0 times"), planted_fault.altered_sources("no such text", ""):
        _source.render("flash_fwd", {})


def test_activations_are_whole_texts():
    inputs = activations.load()
    assert [(x.layer, x.tokens) for x in inputs] == [(layer, n) for layer in (0, 5) for n in (129, 27, 32, 9)]
    assert all(x.q.shape == x.k.shape == x.v.shape == (12, x.tokens, 32) and x.q.dtype == np.float16 for x in inputs)
