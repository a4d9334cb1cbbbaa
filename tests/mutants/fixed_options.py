"""Of the mutants made by hand, those of options: bands, lengths, scores, dropout, parts."""

from tests.mutants.fault import Fault

VARIANTS = [
    Fault(
        "the shift of lengths has the wrong sign",
        "sequence.cuh",
        "shift = seqlen_k - seqlen_q;",
        "shift = seqlen_q - seqlen_k;",
        about="seqlens_q=Len",
    ),
    Fault(
        "a band is not shifted by lengths",
        "sequence.cuh",
        "int64_t(band_right) + shift",
        "int64_t(band_right)",
        about="seqlens_q=Len",
    ),
    Fault(
        "a part's end is its beginning",
        "sequence.cuh",
        "int64_t(split_begin) + params.variant.split_size",
        "int64_t(split_begin)",
        about="split_size",
    ),
    Fault(
        "a part has one key more",
        "sequence.cuh",
        "+ params.variant.split_size));",
        "+ params.variant.split_size + 1));",
        about="split_size",
    ),
    Fault(
        "a packed sequence starts with the batch",
        "sequence.cuh",
        "first_key = offset_k[0];",
        "first_key = offset_q[0];",
        about="PackedCase",
    ),
    *(
        Fault(f"{place} are counted from 0 where they have an origin", file, text, without, about="origin")
        for place, file, text, without in (
            ("keys of dropout", "dropout.cuh", "j += first.key;", ""),
            ("queries of dropout", "dropout.cuh", "uint32_t(first.query + i)", "uint32_t(i)"),
            ("batches", "variant.cuh", "batch += int(", "batch = int("),
            ("heads", "variant.cuh", "head += int(", "head = int("),
            ("queries of expressions", "score.cuh", "first.query + i", "i"),
            ("keys of expressions", "score.cuh", "first.key + j", "j"),
        )
    ),
    Fault(
        "pairs of keys begin at even ones, whatever they are counted from",
        "dropout.cuh",
        "if (ORIGIN) return kept_bits(keeps(i, j), keeps(i, j + 1));",
        "",
        about="origin",
    ),
    Fault("the cap is forgotten", "score.cuh", "score = softcapped(score, cap);", ""),
    Fault("ALiBi of the wrong sign", "score.cuh", "fma(-slope, distance(i, j)", "fma(slope, distance(i, j)"),
    Fault("ALiBi without a shift", "score.cuh", "int64_t(i) + shift - j", "int64_t(i) - j"),
    Fault(
        "the bias is transposed",
        "score.cuh",
        "score.value += converted<Compute>(Element<BIAS>::load(bias(i, j)));",
        "score.value += converted<Compute>(Element<BIAS>::load(bias(j, i)));",
    ),
    Fault(
        "a mask keeps what it removes", "score.cuh", "if (!mask(i, j)) return false;", "if (mask(i, j)) return false;"
    ),
    Fault(
        "-inf of a score function is a number",
        "score.cuh",
        "scaled < -3.4e38f && score != -infinity()",
        "scaled < -3.4e38f",
        about="score_mod",
    ),
    Fault(
        "heads and batches of dropout are swapped",
        "dropout.cuh",
        "uint32_t(first.head), uint32_t(first.batch)}",
        "uint32_t(first.batch), uint32_t(first.head)}",
        about="dropout_p",
    ),
    Fault(
        "queries and keys of dropout are swapped",
        "dropout.cuh",
        "{uint32_t(j) >> 2, uint32_t(first.query + i),",
        "{uint32_t(first.query + i) >> 2, uint32_t(j),",
        about="dropout_p",
    ),
    Fault(
        "words of dropout in another order",
        "dropout.cuh",
        "const uint2 pair = j & 2 ? uint2{four.z, four.w} : uint2{four.x, four.y};",
        "const uint2 pair = j & 2 ? uint2{four.x, four.y} : uint2{four.z, four.w};",
        about="dropout_p",
    ),
    Fault(
        "what is to be kept is dropped",
        "dropout.cuh",
        "kept_bits(pair.x >= drop_below, pair.y >= drop_below)",
        "kept_bits(pair.x < drop_below, pair.y < drop_below)",
        about="dropout_p",
    ),
    Fault("nine rounds of Philox", "philox.cuh", "round < 10", "round < 9", about="dropout_p"),
    Fault("the key of Philox stays", "philox.cuh", "key0 += 0x9E3779B9u;", "", about="dropout_p"),
    Fault(
        "a sink is added twice",
        "softmax.cuh",
        "row_sum[m][half] = __fmaf_rn(row_sum[m][half], factor, exponential(",
        "row_sum[m][half] = __fmaf_rn(row_sum[m][half], factor, 2.0f * exponential(",
    ),
    Fault(
        "a sink adds to the sum before it",
        "softmax.cuh",
        "__fmaf_rn(row_sum[m][half], factor, exponential(",
        "__fmaf_rn(row_sum[m][half], 1.0f, exponential(",
        about="values='large'",
    ),
    Fault(
        "queries behind the length keep their results",
        "flash_fwd.cu",
        "const bool counts = LENGTHS != PADDED || sequence.counts(first_query + row);",
        "const bool counts = true;",
        about="seqlens_q=Lengths",
    ),
    Fault(
        "the first key of a window is left out",
        "mask.cuh",
        "return column <= last[m][half] && (!BAND_LEFT || column >= first[m][half]);",
        "return column <= last[m][half] && (!BAND_LEFT || column > first[m][half]);",
        about="window_size=(33, None)",
    ),
    Fault(
        "the first tile of a window is left out",
        "block_range.cuh",
        "seen_first < sequence.seqlen_k ? seen_first / BLOCK_N : tiles.end;",
        "seen_first < sequence.seqlen_k ? seen_first / BLOCK_N + 1 : tiles.end;",
    ),
    Fault(
        "a tile that a window's left edge cuts is interior",
        "block_range.cuh",
        "min(ceil_div(seen_by_last, BLOCK_N), tiles.end)",
        "min(seen_by_last / BLOCK_N, tiles.end)",
        about="window_size=(33, None))), with_dlse",
    ),
    Fault(
        "the rows of stacked heads are queries of one head",
        "sequence.cuh",
        "return STACKED ? uint32_t(row) % uint32_t(rows_per_head) : row;",
        "return row;",
        about="leading_q=(2, 6)",
    ),
    Fault(
        "stacked heads have the operands of the first",
        "sequence.cuh",
        "return STACKED ? int(min(row, int64_t(num_rows - 1))) / rows_per_head : 0;",
        "return 0;",
        about="leading_q=(2, 6)",
    ),
    Fault(
        "parts visit the keys before them",
        "block_range.cuh",
        "if constexpr (SPLIT) tiles.begin = max(tiles.begin, sequence.split_begin / BLOCK_N);",
        "",
        about="split_size",
    ),
    Fault(
        "a left edge is one key further",
        "visible.cuh",
        "query + band_left, int64_t(0)",
        "query + band_left - 1, int64_t(0)",
        about="window_size=(33, None)",
    ),
    Fault(
        "the joined parts take no sink", "flash_combine.cu", "lse_max = larger(lse_max, sink);", "sink = -infinity();"
    ),
    Fault(
        "parts are joined with equal weights", "flash_combine.cu", "total = fma(weight(lse),", "total = fma(Compute(1),"
    ),
    Fault(
        "the last part is left out",
        "flash_combine.cu",
        "sum += weight(params.partial_lse[part * params.num_rows + at]);",
        "if (part + 1 < params.num_parts) sum += weight(params.partial_lse[part * params.num_rows + at]);",
    ),
]
