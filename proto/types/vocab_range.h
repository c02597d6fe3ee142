// Which vocabulary rows a rank has.
//
// Every rank but the last has the same number of rows, the last one what is left; with more ranks
// than that takes, the last ranks have nothing. Replicas of a shard own a part of it each, of which
// they alone keep the optimizer's state.

#ifndef LMHEAD_PROTO_TYPES_VOCAB_RANGE_H_
#define LMHEAD_PROTO_TYPES_VOCAB_RANGE_H_

#include <algorithm>
#include <cstdint>

#include "proto/types/head_spec.h"

namespace lmhead {

// Vocabulary ids [start, stop).
struct VocabRange {
  int64_t start = 0;
  int64_t stop = 0;

  int64_t size() const { return stop - start; }
  bool Contains(int64_t id) const { return start <= id && id < stop; }

  friend bool operator==(const VocabRange&, const VocabRange&) = default;
};

// The rows of `rank` when `num_ranks` share the head: as a vocabulary of spec.partition_vocab_size
// is split, so that two heads with equal partitions lie beside each other whatever their sizes.
// REQUIRES: 0 <= rank < num_ranks; spec is validated.
inline VocabRange ShardRange(const HeadSpec& spec, int32_t num_ranks, int32_t rank) {
  const int64_t split = spec.partition_vocab_size > 0 ? spec.partition_vocab_size : spec.vocab_size;
  const int64_t rows = (split + num_ranks - 1) / num_ranks;
  const int64_t start = std::min(rank * rows, spec.vocab_size);
  const bool last = rank == num_ranks - 1;
  return {start, last ? spec.vocab_size : std::min(start + rows, spec.vocab_size)};
}

// The rows of a shard that `replica` owns when num_replicas have the shard.
// REQUIRES: 0 <= replica < num_replicas.
inline VocabRange OwnedRange(VocabRange shard, int32_t num_replicas, int32_t replica) {
  const int64_t rows = (shard.size() + num_replicas - 1) / num_replicas;
  const int64_t start = std::min(shard.start + replica * rows, shard.stop);
  return {start, std::min(start + rows, shard.stop)};
}

// The ids that are in both; empty, with start before stop or equal to it, when none is.
inline VocabRange Intersection(VocabRange a, VocabRange b) {
  const int64_t start = std::max(a.start, b.start);
  return {start, std::max(start, std::min(a.stop, b.stop))};
}

// Rows of the largest shard: what the memory plan counts.
inline int64_t LargestShard(const HeadSpec& spec, int32_t num_ranks) {
  return std::max(ShardRange(spec, num_ranks, 0).size(),
                  ShardRange(spec, num_ranks, num_ranks - 1).size());
}

}  // namespace lmhead

#endif  // LMHEAD_PROTO_TYPES_VOCAB_RANGE_H_
