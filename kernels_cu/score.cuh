// The final score of a pair, from the product q . k: scaled, capped, modified, biased.

struct ScoreFunction {
    Compute scale;
#if SOFTCAP
    Compute cap;
#endif
#ifdef BIAS
    PairValues<Element<BIAS>::Bits> bias;
#endif
#ifdef ALIBI
    Compute slope;
    int shift;
#endif
#if MASK
    PairValues<unsigned char> mask;
#endif
#if SCORE_MOD || MASK_MOD
    Place first;
    int seqlen_q, seqlen_k;
    AuxArrays aux;
#endif

    ScoreFunction() = default;

    // `rows` gives an operand's matrix for this batch.
    template <typename Params, typename Rows>
    __device__ ScoreFunction(const Params& params, const Sequence& sequence, Rows rows) : scale(params.scale) {
#if SOFTCAP
        cap = params.variant.softcap;
#endif
#ifdef BIAS
        bias = params.variant.bias.of_batch(rows);
#endif
#ifdef ALIBI
        slope = converted<Compute>(Element<ALIBI>::load(*rows(params.variant.alibi_slopes)));
        shift = sequence.shift;
#endif
#if MASK
        mask = params.variant.mask.of_batch(rows);
#endif
#if SCORE_MOD || MASK_MOD
        first = Place(params, rows);
        seqlen_q = sequence.seqlen_q, seqlen_k = sequence.num_keys;
        aux = params.variant.aux;
#endif
    }

    // Of query i and key j, which both exist.
    __device__ __forceinline__ Dual operator()(Compute product, int i, int j) const {
        Dual score = {product * scale, Compute(1)};
#if SOFTCAP
        score = softcapped(score, cap);
#endif
#if SCORE_MOD
        const Dual modified = score_mod({score.value, Compute(1)}, pair(i, j), aux);
        score = {modified.value, modified.derivative * score.derivative};
        if (score.value == -infinity()) return score;   // removed, whatever is added to it
#endif
#ifdef BIAS
        score.value += converted<Compute>(Element<BIAS>::load(bias(i, j)));
#endif
#ifdef ALIBI
        score.value = fma(-slope, distance(i, j), score.value);
#endif
        return score;
    }

#ifdef ALIBI
    __device__ __forceinline__ Compute distance(int i, int j) const { return Compute(abs(int64_t(i) + shift - j)); }
#endif

    // Whether masks that are given pair by pair leave this one, and a bias, whose -inf removes it like a mask.
    __device__ __forceinline__ bool keeps(int i, int j) const {
#if MASK
        if (!mask(i, j)) return false;
#endif
#if MASK_MOD
        if (!mask_mod(pair(i, j), aux)) return false;
#endif
#ifdef BIAS
        if (Element<BIAS>::load(bias(i, j)) == -infinity()) return false;   // -inf + NaN would be NaN
#endif
        return true;
    }

#if SCORE_MOD || MASK_MOD
private:
    __device__ __forceinline__ Pair pair(int i, int j) const {
        return {first.batch, first.head, first.query + i, first.key + j, seqlen_q, seqlen_k};
    }
#endif
};

// A score in base 2 for ex2. One that is finite stays so: a large negative bias is a number, only -inf removes.
__device__ __forceinline__ float in_base_2(float score) {
    const float scaled = score * LOG2_E;
    if (scaled < -3.4e38f && score != -infinity()) return -3.4e38f;
    return scaled > 3.4e38f && score != infinity() ? 3.4e38f : scaled;   // and a NaN stays one
}
