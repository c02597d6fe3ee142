// Random initial weights that depend on (seed, row, column) alone: neither on the sharding nor on
// the backend, which all take them from here.
//
// The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// 2011) with the seed as its key (low word first) and the counter (column / 4, 0, row low, row
// high); the four words of a counter serve columns 4k to 4k + 3. Words become normal numbers by the
// Box-Muller transform in double precision: with u = (word + 0.5) / 2^32, columns 4k and 4k + 1 are
// sqrt(-2 log u0) times cos and sin of 2 pi u1, columns 4k + 2 and 4k + 3 the same of u2 and u3.

#ifndef LMHEAD_KERNELS_CPU_WEIGHT_INIT_H_
#define LMHEAD_KERNELS_CPU_WEIGHT_INIT_H_

#include <array>
#include <cstdint>

namespace lmhead::cpu {

// The generator itself.
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// Fills `weight` [num_rows, cols] with std * Normal(0, 1), the rows being row_start and following
// of the whole weight.
void FillNormal(uint64_t seed, double std, int64_t row_start, int64_t num_rows, int64_t cols,
                float* weight);

}  // namespace lmhead::cpu

#endif  // LMHEAD_KERNELS_CPU_WEIGHT_INIT_H_
