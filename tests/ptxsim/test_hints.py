"""Instructions that only order, hint or wait: they change no register and no memory."""

import numpy as np
import pytest

from .fuzz.compare import launch_ptx
from .launching import poisoned

HINTS = [
    *("membar.cta;", "membar.gl;", "membar.sys;", "fence.acq_rel.gpu;", "fence.sc.cta;", "fence.acquire.cluster;"),
    *("fence.proxy.alias;", "fence.proxy.async;", "fence.proxy.async.shared::cta;", "fence.proxy.async.global;"),
    "fence.mbarrier_init.release.cluster;",
    *(
        "prefetch.global.L1 [%at];",
        "prefetch.L2 [%at];",
        "prefetch.global.L2::evict_last [%at];",
        "prefetchu.L1 [%at];",
    ),
    *("applypriority.global.L2::evict_normal [%at], 128;", "nanosleep.u32 20;", "nanosleep.u32 %t;", "brkpt;"),
    *("griddepcontrol.wait;", "griddepcontrol.launch_dependents;", "bar.warp.sync 0xffffffff;"),
]


@pytest.mark.parametrize("guard", ["", "@%p ", "@!%p "])
def test_hints_do_nothing(guard):
    lines = "\n".join((guard if not hint.startswith(("bar", "grid")) else "") + hint for hint in HINTS)
    out = poisoned(64, np.uint32)
    text = f"""
.version 8.8
.target sm_100
.address_size 64
.visible .entry hints(.param .u64 out)
{{
.reg .b64 %at; .reg .b32 %t; .reg .pred %p;
mov.u32 %t, %tid.x; mul.wide.u32 %at, %t, 4; setp.lt.u32 %p, %t, 11;
{{ .reg .b64 %first; ld.param.u64 %first, [out]; add.u64 %at, %at, %first; }}
st.global.u32 [%at], %t;
{lines}
ld.global.u32 %t, [%at]; add.u32 %t, %t, 1; st.global.u32 [%at], %t;
ret;
}}"""
    launch_ptx(text, "hints", (1,), (64,), (out,))
    np.testing.assert_array_equal(out, np.arange(64) + 1)
