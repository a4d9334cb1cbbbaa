"""Compilation: what the disk cache keeps and for whom, homes that cannot be written, a compiler that is not there."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cupyflash import ptxsim
from cupyflash.ptxsim import binding, compile

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="POSIX homes and permissions")
VALUE = 'extern "C" __global__ void value(int* out) { *out = VALUE; }'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache directory."""
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def value(source, *options):
    """What the kernel `value` of a source writes."""
    out = np.zeros(1, np.int32)
    ptxsim.RawModule(code=source, options=options).get_function("value")((1,), (1,), (out,))
    return int(out[0])


@pytest.mark.parametrize("form", ["-I{folder}", "--include-path={folder}", "-I|{folder}", "absolute", "directory"])
def test_a_changed_header_is_compiled_again(cache, tmp_path, monkeypatch, form):
    header = tmp_path / "v.h"
    source = f'#include "{header if form == "absolute" else "v.h"}"\n{VALUE}'
    options = form.format(folder=tmp_path).split("|") if form.startswith("-") else ()
    if form == "directory":
        monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        header.write_text(f"#define VALUE {number}\n")
        assert value(source, *options) == number


def test_a_changed_header_of_an_option_is_compiled_again(cache, tmp_path):
    header = tmp_path / "v.h"
    for number in (1, 2):
        header.write_text(f"#define VALUE {number}\n")
        assert value(VALUE, f"--pre-include={header}") == number


def test_toolkit_headers_are_cached(cache, monkeypatch):
    source = f"#include <cuda_fp16.h>\n{VALUE}"
    assert value(source, "-DVALUE=3") == 3
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(compile, "_run_nvrtc", None)
    assert value(source, "-DVALUE=3") == 3


@posix_only
def test_a_shared_cache_is_readable(cache):
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            value(VALUE, f"-DVALUE={mask}")
        finally:
            os.umask(before)
        newest = max(cache.iterdir(), key=lambda entry: entry.stat().st_mtime_ns)
        assert newest.stat().st_mode & 0o777 == mode


@pytest.fixture
def fresh_cache(monkeypatch):
    """No temporary directory yet, as in a new process."""
    monkeypatch.setattr(compile, "_CACHE", compile._Cache())


def test_a_write_that_fails_leaves_nothing(cache, fresh_cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert value(VALUE, "-DVALUE=5") == 5
    assert list(cache.iterdir()) == list(Path(compile._CACHE.temporary.name).iterdir()) == []


def test_a_cache_that_cannot_be_written_warns_once_and_is_replaced(cache, fresh_cache, monkeypatch):
    cache.write_text("a file, where a directory should be")
    with pytest.warns(UserWarning, match="CUPYFLASH_CACHE_DIR") as warned:
        for number in (7, 8):
            assert value(VALUE, f"-DVALUE={number}") == number
    assert (
        sum(issubclass(w.category, UserWarning) for w in warned) == 1
    )  # not counting a ResourceWarning of a test before
    assert len(list(Path(compile._CACHE.temporary.name).iterdir())) == 2
    monkeypatch.setattr(compile, "_run_nvrtc", None)
    assert value(VALUE, "-DVALUE=7") == 7


def test_an_unwritable_cache_is_still_read(cache, fresh_cache, monkeypatch):
    assert value(VALUE, "-DVALUE=9") == 9
    monkeypatch.setattr(compile, "_run_nvrtc", None)
    monkeypatch.setattr(compile, "_write", None)
    assert value(VALUE, "-DVALUE=9") == 9


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b"", lambda b: b.replace(b"9", b"8"), lambda b: b"\xff" + b]
)
def test_a_damaged_entry_is_compiled_again(cache, damage):
    value(VALUE, "-DVALUE=9")
    (entry,) = cache.iterdir()
    sound = entry.read_bytes()
    entry.write_bytes(damage(sound))
    assert value(VALUE, "-DVALUE=9") == 9
    assert entry.read_bytes() == sound


def test_processes_that_race_for_one_entry(cache):
    """Each compiles or reads a whole entry, and one sound entry is left."""
    program = f"""import numpy as np
from cupyflash import ptxsim
out = np.zeros(1, np.int32)
input()
ptxsim.RawModule(code={VALUE!r}, options=("-DVALUE=4",)).get_function("value")((1,), (1,), (out,))
print(int(out[0]))"""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    racers = [subprocess.Popen([sys.executable, "-W", "error", "-c", program], **pipes) for _ in range(4)]
    for racer in racers:  # all have begun; now they go
        racer.stdin.write("\n")
        racer.stdin.flush()
    results = [racer.communicate(timeout=120) for racer in racers]
    assert results == [("4\n", "")] * 4
    assert [entry.suffix for entry in cache.iterdir()] == [".ptx"]


@posix_only
def test_text_is_utf_8_whatever_the_locale(tmp_path):
    source = r"'__global__ void f() { asm volatile(\"// \u00e9\"); }'"
    program = f"from cupyflash.ptxsim import compile_ptx; print(ascii(compile_ptx({source})))"
    environment = {**os.environ, "CUPYFLASH_CACHE_DIR": str(tmp_path), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-X", "utf8=0", "-c", program]
    first, second = (subprocess.run(command, env=environment, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert r"\xe9" in first.stdout == second.stdout and len(list(tmp_path.iterdir())) == 1


@posix_only
def test_the_cache_directory_may_begin_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "~/kept")
    assert compile.cache_directory() == tmp_path / "kept"


def test_without_a_home_the_cache_is_temporary(fresh_cache, monkeypatch):
    def homeless(*_):
        raise RuntimeError("Could not determine home directory.")

    for name in ("CUPYFLASH_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.warns(UserWarning, match="home directory") as warned:
        assert value(VALUE, "-DVALUE=6") == 6
    assert [warning.filename for warning in warned] == [__file__]
    assert len(list(Path(compile._CACHE.temporary.name).iterdir())) == 1


@posix_only
def test_a_home_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    environment = {**os.environ, "HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path)}
    for name in ("CUPY_CACHE_DIR", "CUPYFLASH_CACHE_DIR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    program = "from cupyflash import ptxsim; ptxsim.compile_ptx('__global__ void f() {}')"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UserWarning") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("cupyflash-")] == []


def test_a_chosen_cache_of_cupy_is_kept(monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", "/chosen")
    binding.give_cupy_a_cache()
    assert os.environ["CUPY_CACHE_DIR"] == "/chosen"


class _NoLibrary:
    def getVersion(self):
        raise RuntimeError('Failure finding "libnvrtc.so.13":\n  searched everywhere')


@pytest.mark.parametrize("missing", ["cupy", "nvrtc"])
def test_a_missing_compiler_is_named(cache, monkeypatch, missing):
    if missing == "cupy":
        monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    else:
        from cupy_backends.cuda import libs

        monkeypatch.setattr(libs, "nvrtc", _NoLibrary(), raising=False)
    with pytest.raises(ptxsim.CompilerMissing, match=r'NVRTC is needed .* pip install "cupyflash\[cuda13\]"'):
        ptxsim.RawModule(code=VALUE, options=("-DVALUE=1",))


PICK = """
struct Params { float* out; float values[8]; };
extern "C" __global__ void pick(const __grid_constant__ Params params) {
    params.out[threadIdx.x] = params.values[threadIdx.x % 8];
}"""


@pytest.mark.parametrize("option", ["-G", "--device-debug", "-Ofc=max", "--Ofast-compile=max"])
def test_no_option_lasts_beyond_its_program(option, tmp_path, monkeypatch):
    ptx = []
    for folder in "before", "after":
        monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / folder))
        ptx.append(ptxsim.compile_ptx(PICK))
        ptxsim.compile_ptx(VALUE, ("-DVALUE=1", option))
    assert ptx[0] == ptx[1]
    with pytest.raises(ptxsim.CompileError, match="nothing") as caught:
        ptxsim.compile_ptx(VALUE, ("-DVALUE=nothing", option))
    assert caught.value.source == VALUE
