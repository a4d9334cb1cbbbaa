"""Source with what each line costs: as an HTML page, as a figure, as text and JSON."""

import html.parser
import importlib
import json
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest

from cupyflash import ptxsim
from cupyflash.ptxsim.devices import BOUNDED, device
from cupyflash.ptxsim.errors import CompilerMissing

from .launching import OPTIONS, poisoned, zeros

RESOURCES = importlib.import_module("cupyflash.ptxsim.resources")

TRANSPOSE = r"""
extern "C" __global__ void transpose(const float* in, float* out, int n) {
  __shared__ float tile[32][32];
  tile[threadIdx.y][threadIdx.x] = in[(blockIdx.y * 32 + threadIdx.y) * n + blockIdx.x * 32 + threadIdx.x];
  __syncthreads();  // a < b && "c" > 'd'
#line 70 "turned & <back>.cuh"
  out[(blockIdx.x * 32 + threadIdx.y) * n + blockIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];



  if (threadIdx.x < 2) for (int i = 0; i < n; ++i) atomicAdd(out + i, 0.0f);
}"""


def profiled():
    """The profile of four blocks of the transpose."""
    with ptxsim.profile() as profile:
        run = ptxsim.RawModule(code=TRANSPOSE, options=OPTIONS).get_function("transpose")
        run((2, 2), (32, 32), (zeros(4096), zeros(4096), np.int32(64)))
    return profile.kernels[0]


@pytest.fixture(scope="module")
def kernel():
    return profiled()


class _Page(html.parser.HTMLParser):
    """Rows of cells of a page and their attributes; elements have to be closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.styles, self.loads = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
            self.styles.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.styles[-1].append(dict(attributes))
        self.loads += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.rows and self.open and self.open[-1] in ("td", "th", "small"):
            self.rows[-1][-1] += text


def text_of(kernel, directory):
    kernel.to_html(directory / "page.html")
    return (directory / "page.html").read_text(encoding="utf-8")


@pytest.fixture
def page(kernel, tmp_path):
    return _Page(text_of(kernel, tmp_path))


def test_the_page_shows_each_line_with_its_numbers(kernel, page):
    """4 blocks of 32 warps: each stores a row, one wavefront, and reads a column, 32."""
    by_number = {row[0]: row[1:] for row in page.rows if len(row) == 6}
    lines = {line.line: line for line in kernel.lines}
    assert by_number["4"] == [TRANSPOSE.splitlines()[3], f"{lines[4].warp_instructions:,}", "100 %", "512", "128"]
    assert by_number["70"][1:] == [f"{lines[70].warp_instructions:,}", "100 %", "512", "4,09632 x ideal"]
    assert by_number["74"][2] == f"{100 * lines[74].active_lane_efficiency:.3g} %" != "100 %"
    assert by_number["3"] == [TRANSPOSE.splitlines()[2], "", "", "", ""]


def test_bars_and_warnings(page):
    """Bars are shares of the largest number of a column; red is what wastes."""
    at = {row[0]: n for n, row in enumerate(page.rows) if len(row) == 6}
    conflicts, fine = (page.styles[at[line]][5] for line in ("70", "4"))
    assert "100.0%" in conflicts["style"] and conflicts["class"] == "n warn"
    assert ":3.1%" in fine["style"] and fine["class"] == "n"
    assert page.styles[at["74"]][3]["class"] == "n warn"


def test_the_page_needs_nothing_else_and_escapes_what_it_shows(kernel, page, tmp_path):
    assert page.loads == []
    text = text_of(kernel, tmp_path)
    assert "a &lt; b &amp;&amp; &quot;c&quot; &gt; &#x27;d&#x27;" in text
    assert "<h2>turned &amp; &lt;back&gt;.cuh</h2>" in text and "<back>" not in text


def test_the_page_shows_the_bound_of_each_device(page):
    devices = {row[0]: row[1:] for row in page.rows if row and row[0].endswith(tuple(BOUNDED))}
    assert len(devices) == len(BOUNDED)
    assert devices["A100 sm_80"][0] == "1,056"  # shared memory: 4 * 32 * (1 + 32) wavefronts on 4 multiprocessors


def test_a_column_that_has_no_numbers_is_left_out(tmp_path):
    source = 'extern "C" __global__ void copy(const int* x, int* y) { y[threadIdx.x] = x[threadIdx.x]; }'
    with ptxsim.profile() as profile:
        ptxsim.RawModule(code=source).get_function("copy")((1,), (32,), (zeros(32), zeros(32)))
    text = text_of(profile.kernels[0], tmp_path)
    assert "global sectors" in text and "shared wavefronts" not in text


def test_lines_far_apart_are_separated_by_a_gap(tmp_path):
    source = 'extern "C" __global__ void far(volatile int* x) {\n x[threadIdx.x] = 1;' + "\n" * 20 + "x[40] = 2;\n}"
    with ptxsim.profile() as profile:
        ptxsim.RawModule(code=source).get_function("far")((1,), (32,), (poisoned(64, np.int32),))
    rows = _Page(text_of(profile.kernels[0], tmp_path)).rows
    (gap,) = [row for row in rows if row[-1].endswith("lines")]
    assert gap == ["", "15 lines"]  # from 5 to 19: two lines are shown after 2, and two before 22


def test_the_colours_are_explained(kernel, page, tmp_path):
    assert "Red: under 90 %" in text_of(kernel, tmp_path)
    assert any("Red: under 90 %" in text.get_text() for text in kernel.figure().axes[0].texts)


def test_no_number_stands_on_a_bar(kernel):
    drawn = kernel.figure()
    bars = [bar.get_window_extent() for bar in drawn.axes[0].patches]
    texts = [text.get_window_extent() for text in drawn.axes[0].texts]
    assert len(bars) > 20 and not any(bar.overlaps(text) for bar in bars for text in texts)


def test_png(kernel, tmp_path):
    matplotlib.use("agg")
    kernel.to_png(tmp_path / "kernel.png")
    image = matplotlib.image.imread(tmp_path / "kernel.png")
    red = (image[..., 0] > 0.95) & (image[..., 1] < 0.9) & (image[..., 2] < 0.9)
    blue = (image[..., 0] < 0.85) & (image[..., 2] > 0.95)
    assert image.shape[1] > 1500 and red.sum() > 1000 and blue.sum() > 1000
    texts = [text.get_text() for text in kernel.figure().axes[0].texts]
    assert "4,096   32 x ideal" in texts and "turned & <back>.cuh" in texts
    matplotlib.pyplot.close("all")


def test_without_matplotlib_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from cupyflash.ptxsim.profile.figure import _pyplot\n"
        "try: _pyplot()\nexcept ImportError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "figures need Matplotlib: pip install matplotlib\n"


def test_matplotlib_is_loaded_only_for_figures():
    code = "import sys, cupyflash.ptxsim; print('matplotlib' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_text_and_json_say_what_a_kernel_needs(kernel):
    needs = kernel.resources
    assert (needs.kernel, needs.arch, needs.static_shared_bytes, needs.barriers) == ("transpose", "sm_80", 4096, 1)
    assert kernel.occupancy.blocks == 2 and kernel.occupancy.limited_by == ("warps",)
    text = str(kernel)
    assert f"{needs.registers} registers, no spills" in text
    assert "2 blocks, 64 of 64 warps, limited by warps" in text
    assert "A100 (sm_80)" in text and "1,056 cycles, shared memory" in text
    found = json.loads(json.dumps(kernel.as_dict()))
    assert found["resources"]["registers"] == needs.registers
    assert found["occupancy"]["limited_by"] == ["warps"]
    assert found["lower_bounds"]["A100"]["cycles"] == 1056
    assert set(found["lower_bounds"]) == {device(arch).name for arch in BOUNDED}


def test_dynamic_shared_memory_counts_for_occupancy():
    source = 'extern "C" __global__ void dynamic(int* x) { extern __shared__ int s[]; s[threadIdx.x] = 1; *x = s[0]; }'
    with ptxsim.profile() as profile:
        run = ptxsim.RawModule(code=source).get_function("dynamic")
        run((1,), (32,), (poisoned(1, np.int32),), shared_mem=40 * 1024)
    assert profile.kernels[0].occupancy.limits["shared memory"] == 4


def test_a_kernel_is_assembled_once(monkeypatch):
    """Also where its options name directories, which keeps the log out of the cache."""
    asked, log = [], RESOURCES.assembler_log
    monkeypatch.setattr(RESOURCES, "assembler_log", lambda *arguments: asked.append(arguments) or log(*arguments))
    kernel = profiled()
    assert asked == []
    str(kernel), kernel.as_dict(), kernel.occupancy
    assert len(asked) == 1


def test_without_a_compiler_the_rest_is_shown(monkeypatch, tmp_path):
    def missing(*arguments):
        raise CompilerMissing("no NVRTC")

    monkeypatch.setattr(RESOURCES, "assembler_log", missing)
    kernel = profiled()
    assert kernel.as_dict()["resources"] is None and kernel.as_dict()["lower_bounds"]["A100"]
    assert "registers" not in str(kernel)
    assert "registers" not in text_of(kernel, tmp_path)
    with pytest.raises(CompilerMissing):
        _ = kernel.resources


def test_nothing_is_assembled_unless_asked_for(monkeypatch):
    def never(*arguments):
        raise AssertionError("ptxas ran")

    monkeypatch.setattr(RESOURCES, "assembler_log", never)
    kernel = profiled()
    assert kernel.lower_bound("A100").cycles > 0
    with pytest.raises(AssertionError, match="ptxas ran"):
        _ = kernel.resources
