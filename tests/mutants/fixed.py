"""Mutants made by hand, one of each kind of fault, by the text that it changes."""

from tests.mutants.fault import Fault
from tests.mutants.fixed_options import VARIANTS

FORWARD = [
    Fault(
        "accumulators keep the scale of the last maximum",
        "softmax.cuh",
        "alpha[m][half] = exponential(old_max - new_max);",
        "alpha[m][half] = 1.0f;",
        about="values='rising'",
    ),
    Fault("the sum is not rescaled", "flash_fwd.cu", "softmax.row_sum[m][half] *= alpha[m][half];", ""),
    Fault(
        "one accumulator is not rescaled",
        "flash_fwd.cu",
        "acc[m][d][2 * half + 1] = mul_rn(acc[m][d][2 * half + 1], alpha[m][half]);",
        "",
    ),
    Fault(
        "rescaling flushes subnormals",
        "ptx.cuh",
        '"mul.rn.f32 %0, %1, %2;"',
        '"mul.rn.ftz.f32 %0, %1, %2;"',
        about="independent_of_rescaling",
    ),
    Fault("a lane's maximum is not shared", "softmax.cuh", "__shfl_xor_sync(FULL_WARP, tile_max, 2)", "tile_max"),
    Fault(
        "a lane's sum is not shared",
        "softmax.cuh",
        "row_sum[m][half] += __shfl_xor_sync(FULL_WARP, row_sum[m][half], 1);",
        "",
    ),
    Fault("a minimum instead of the maximum", "softmax.cuh", "fmaxf(old_max, tile_max", "fminf(old_max, tile_max"),
    Fault("lse in base 2", "softmax.cuh", "+ lg2_approx(row_sum[m][half])) * LN2", "+ lg2_approx(row_sum[m][half]))"),
    Fault(
        "a row without keys divides by 0", "softmax.cuh", "== NO_KEY ? 0.0f :", "== 1.0f ? 0.0f :", about="seqlen_k=0"
    ),
    Fault(
        "weights of one row in the place of another's",
        "softmax.cuh",
        "this->set(m, half + 2 * side,",
        "this->set(m, (half ^ side) + 2 * side,",
    ),
    Fault(
        "weights in swapped order",
        "softmax.cuh",
        "{weight[2 * side], weight[2 * side + 1]});",
        "{weight[2 * side + 1], weight[2 * side]});",
    ),
    Fault("weights and results are truncated", "ptx.cuh", "cvt.rn.f16x2.f32", "cvt.rz.f16x2.f32"),
    Fault("bfloat16 is truncated", "ptx.cuh", "cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32", about="unbiased"),
    Fault(
        "a value fragment is not transposed",
        "ptx.cuh",
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared",
        "ldmatrix.sync.aligned.m8n8.x4.shared",
    ),
    Fault("rows that do not exist are read", "ptx.cuh", "[%0], [%1], 16, ignore_src;", "[%0], [%1], 16;"),
    Fault(
        "the causal mask hides the diagonal",
        "mask.cuh",
        "return column <= last[m][half]",
        "return column < last[m][half]",
    ),
    Fault("masked scores are 0", "mask.cuh", "scores[m][n][i] = -infinity();", "scores[m][n][i] = 0.0f;"),
    Fault(
        "the mask is one query late",
        "mask.cuh",
        "sequence.query(first_query + m * MMA_M + half * 8 + lane / 4);",
        "sequence.query(first_query + m * MMA_M + half * 8 + lane / 4 + 1);",
    ),
    Fault("the last key is dropped", "visible.cuh", "return seqlen_k - 1;", "return seqlen_k - 2;"),
    Fault(
        "a boundary tile counts as interior",
        "block_range.cuh",
        "seen_by_all / BLOCK_N",
        "ceil_div(seen_by_all, BLOCK_N)",
    ),
    Fault(
        "masked tiles are visited",
        "block_range.cuh",
        "ceil_div(seen_by_any, BLOCK_N)",
        "ceil_div(sequence.seqlen_k, BLOCK_N)",
        about="no_more_work",
    ),
    Fault(
        "a bank conflict in every load",
        "tile.cuh",
        "(chunk % CHUNKS_PER_LINE ^ row % 8)",
        "(chunk % CHUNKS_PER_LINE ^ row % 2)",
        about="no_more_work",
    ),
    Fault("a copy is not part of its group", "tile.cuh", "        }\n        cp_async_commit_group();", "        }"),
    Fault(
        "the last columns are not stored", "tile.cuh", "chunk * CHUNK < head_dim)", "chunk * CHUNK + CHUNK < head_dim)"
    ),
    Fault(
        "the next value tile overwrites the one in use",
        "flash_fwd.cu",
        "__syncthreads();   // the key tile has landed, and every warp is done with the last value tile",
        "",
        about="in_any_order",
    ),
    Fault(
        "the next key tile overwrites the one in use",
        "flash_fwd.cu",
        "__syncthreads();   // the value tile has landed, and every warp is done with the key tile",
        "",
        about="in_any_order",
    ),
    Fault(
        "a lane reads what another has yet to write",
        "flash_fwd.cu",
        "__syncwarp();   // a warp stores",
        "// a warp stores",
        about="waits_in_the_epilogue",
    ),
    Fault(
        "query copies may land on results",
        "flash_fwd.cu",
        "cp_async_wait_group<0>();\n    __syncthreads();   // every warp is done with the query tile",
        "__syncthreads();   // every warp is done with the query tile",
        about="waits_in_the_epilogue",
    ),
    Fault(
        "values are cleaned while others look for NaN",
        "flash_fwd.cu",
        "__syncthreads();   // every warp has seen the values",
        "",
        about="nonfinite_in_any_order",
    ),
    Fault(
        "NaN passes through a weight of 0",
        "flash_fwd.cu",
        "remove_nonfinite<ELEMENT>(value_loader);",
        "",
        about="without_influence",
    ),
    Fault(
        "NaN does not reach the queries that see it",
        "flash_fwd.cu",
        "spread_nonfinite<ELEMENT>(acc, value_tile, mask, lane);",
        "",
        about="each_",
    ),
    Fault(
        "a negative scale makes the maximum a minimum",
        "flash_fwd.cu",
        "if constexpr (!SCALE_POSITIVE) multiply(scores, params.scale_log2);",
        "",
        about="softmax_scale=-",
    ),
    Fault("offsets of 32 bits", "common.cuh", "int64_t elements = 0;", "int elements = 0;", about="far_apart"),
    Fault(
        "a batch index takes the wrong digit",
        "common.cuh",
        "(index % size[dim]) * stride[dim]",
        "(index % size[0]) * stride[dim]",
    ),
]

BACKWARD = [
    Fault(
        "delta is dropped",
        "weight.cuh",
        "weight[0] * (dweight[0] - delta.x)",
        "weight[0] * dweight[0]",
    ),
    Fault("a query's lse is its neighbour's", "weight.cuh", "-lse_log2.x)", "-lse_log2.y)"),
    Fault("dlse of the wrong sign", "flash_bwd_delta.cu", "delta - params.dlse[query]", "delta + params.dlse[query]"),
    Fault("two lanes are left out of delta", "flash_bwd_delta.cu", "lanes > 0;", "lanes > 1;"),
    Fault("dq is not scaled", "flash_bwd_dq.cu", "dquery, params.scale, lane", "dquery, 1.0f, lane"),
    Fault(
        "dout of the other stage",
        "flash_bwd_dkdv.cu",
        "dout_loader.load_async(queries_left, stage);",
        "dout_loader.load_async(queries_left, OWNED_BYTES - stage);",
    ),
    Fault(
        "queries that do not exist are read",
        "flash_bwd_dq.cu",
        "row < num_queries ? delta_rows[row] : 0.0f",
        "delta_rows[row]",
    ),
    Fault(
        "queries in transposed order",
        "flash_bwd_dkdv.cu",
        "factors.multiply(gradient, row +",
        "factors.multiply(gradient, column +",
    ),
    Fault(
        "the diagonal has no gradient",
        "mask.cuh",
        "column - row >= sees_first",
        "column - row > sees_first",
    ),
    Fault(
        "the first query tile is left out",
        "block_range.cuh",
        "int(sees_first / BLOCK_M) : num_tiles",
        "int((sees_first + BLOCK_M - 1) / BLOCK_M) : num_tiles",
    ),
    Fault(
        "query tiles that see nothing are visited",
        "block_range.cuh",
        "tiles.begin = sees_first < sequence.seqlen_q ? int(sees_first / BLOCK_M) : num_tiles;",
        "",
        about="no_more_work",
    ),
    Fault(
        "a summed dimension takes the strides of the others",
        "common.cuh",
        "reduced.offset(reduced_index, reduced_stride)",
        "reduced.offset(reduced_index, owner_stride)",
        about="form='pairs of heads'",
    ),
    Fault(
        "the next query tile overwrites the one in use",
        "flash_bwd_dkdv.cu",
        "__syncthreads();   // this stage has landed, and every warp is done with the other and with what it received",
        "",
        about="in_any_order",
    ),
    Fault(
        "dS is made of what another warp has not left yet",
        "flash_bwd_dkdv.cu",
        "bar_sync(SENT, NUM_THREADS);",
        "",
        about="in_any_order",
    ),
    Fault(
        "the next key tile overwrites the only stage",
        "flash_bwd_dq.cu",
        "__syncthreads();   // every warp is done with the only stage",
        "",
        about="in_any_order",
    ),
    Fault(
        "copies may land on gradients",
        "flash_bwd_dq.cu",
        "cp_async_wait_group<0>();\n        __syncthreads();   // every warp is done with all tiles",
        "__syncthreads();   // every warp is done with all tiles",
        about="waits_in_the_epilogue",
    ),
    Fault(
        "dout is cleaned while others look for NaN",
        "flash_bwd_dkdv.cu",
        "__syncthreads();   // every warp has seen the values",
        "",
        about="nonfinite_in_any_order",
    ),
    Fault(
        "NaN of dout passes a weight of 0",
        "flash_bwd_dkdv.cu",
        "remove_nonfinite<ELEMENT>(dout_loader, stage);",
        "",
        about="each_nonfinite_row",
    ),
    Fault(
        "infinite dout does not reach the keys that it sees",
        "flash_bwd_dkdv.cu",
        "if (WITH_DVALUE)\n                            spread(",
        "if (false)\n                            spread(",
        about="each_nonfinite_row",
    ),
]

FMA = [
    Fault(
        "a masked query of a thread's later rows spoils its keys",
        "flash_bwd_dkdv_fma.cu",
        "dscores[m][n] = mask.visible(m, column",
        "dscores[m][n] = mask.visible(0, column",
        about="each_nonfinite_row",
    ),
    # In float32 alone: no bound is as tight as what is said of exp and log.
    Fault(
        "exp is an approximation",
        "flash_fwd_fma.cu",
        "scores[m][n] = natural_exponential(scores[m][n] - row_max[m]);",
        "scores[m][n] -= row_max[m];\n"
        "scores[m][n] = sizeof(ELEMENT) == 4 ? ex2_approx(scores[m][n] * LOG2_E) : exp(scores[m][n]);",
    ),
    Fault(
        "log is an approximation",
        "flash_fwd_fma.cu",
        "log(row_sum[m])",
        "(sizeof(ELEMENT) == 4 ? LN2 * lg2_approx(row_sum[m]) : log(row_sum[m]))",
    ),
    Fault("rows without keys divide by 0", "flash_fwd_fma.cu", "row_sum[m] == ELEMENT(0) ? ELEMENT(0) : x", "x"),
    Fault("lse without the maximum", "flash_fwd_fma.cu", "row_max[m] + log(row_sum[m])", "log(row_sum[m])"),
    Fault(
        "one key of a lane is not compared",
        "flash_fwd_fma.cu",
        "int n = 1; n < THREAD_COLUMNS",
        "int n = 2; n < THREAD_COLUMNS",
        about="maximum",
    ),
    Fault(
        "a value tile overwrites the keys in use",
        "flash_fwd_fma.cu",
        "__syncthreads();   // every warp is done with the key tile",
        "",
    ),
    Fault(
        "the last vector of a row is not stored", "fma.cuh", "|| column >= head_dim)", "|| column + VECTOR >= head_dim)"
    ),
    Fault(
        "halves of a double in swapped order",
        "fma.cuh",
        "__hiloint2double(bits.y, bits.x)",
        "__hiloint2double(bits.x, bits.y)",
    ),
    Fault("keys that do not exist have weight", "mask_fma.cuh", "column < num_keys", "true", about="float32"),
    Fault(
        "every row of a thread has the first one's mask",
        "mask_fma.cuh",
        "column - row_step(m) <= diagonal",
        "column <= diagonal",
    ),
    Fault(
        "one query too few for a key",
        "mask_fma.cuh",
        "return column - row_step(m) >= first",
        "return column - row_step(m) > first",
    ),
    Fault(
        "exp of a gradient's weight is an approximation",
        "weight_fma.cuh",
        "return natural_exponential(fma(score, scale, -shift));",
        "score = fma(score, scale, -shift);\nreturn sizeof(ELEMENT) == 4 ? ex2_approx(score * LOG2_E) : exp(score);",
    ),
    Fault(
        "the next query tile takes the place of the last",
        "flash_bwd_dkdv_fma.cu",
        "query_reloader.load_async(num_queries);",
        "query_loader.load_async(num_queries);",
        about="in_any_order",
    ),
    Fault(
        "queries overwrite dout in use",
        "flash_bwd_dkdv_fma.cu",
        "__syncthreads();   // every warp is done with the dout tile, and with its weights",
        "",
    ),
    Fault(
        "a lane multiplies what another has yet to write",
        "flash_bwd_dq_fma.cu",
        "__syncwarp();   // only the lanes of a warp share its rows",
        "",
    ),
    Fault(
        "the sum of the last tile alone",
        "numerics.cuh",
        "float& total, float part) { total += part; }",
        "float& total, float part) { total = part; }",
        about="accumulate='two-level'",
    ),
]

NAIVE = [
    Fault(
        "the standard method drops the maximum",
        "attention_naive.cu",
        "params.lse[row] = safe_max + ",
        "params.lse[row] = ",
    ),
    Fault(
        "the standard method drops dlse",
        "attention_naive_bwd.cu",
        "if (params.dlse) delta -= params.dlse[row];",
        "",
    ),
]

FAULTS = [*FORWARD, *BACKWARD, *FMA, *NAIVE, *VARIANTS]
