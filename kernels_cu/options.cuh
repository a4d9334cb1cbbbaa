// What the options of a call bring into a kernel. A kernel says before what it computes in: Compute.

#include "dual.cuh"
#include "philox.cuh"
#include "variant.cuh"
#include "sequence.cuh"
#include "score.cuh"
#include "dropout.cuh"
