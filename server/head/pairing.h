// Joins the two sides of paired streams: a chunk is computed when the student's side has brought
// its hidden states and targets, and the teacher's side the teacher's hidden states of the same
// chunk.
//
// A side that comes first waits here, in its own staging slot; how many may wait is bounded by the
// windows of the streams, which are told to their clients and reserved at open. What waits for
// longer than the timeout is given up, and the error names the side that is missing.
//
// The teacher's part is kept when its chunk has been computed, and its answer held back, until the
// student's client has said that it has the result (or its stream has ended): before that the chunk
// may have to be computed again for a student whose connection broke, and the teacher's program
// must not have dropped its hidden states then. So both programs may lose their connections at any
// moment.
//
// Pure bookkeeping: no thread, no compute, no gRPC. Thread-safe; calls no callback.

#ifndef LMHEAD_SERVER_HEAD_PAIRING_H_
#define LMHEAD_SERVER_HEAD_PAIRING_H_

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/head/chunk.h"

namespace lmhead {

class HeadStream;

class Pairing {
 public:
  using StreamId = uint64_t;

  // Which chunk. Evaluation has step 0, where the worker's name alone tells chunks apart.
  struct Key {
    uint64_t step = 0;
    std::string worker;
    uint64_t chunk_index = 0;

    friend auto operator<=>(const Key&, const Key&) = default;
  };

  // One side of a chunk.
  struct Half {
    StreamId stream_id = 0;
    std::shared_ptr<HeadStream> stream;  // What the id stands for; of no use here.
    ArrivedChunk chunk;
    ChunkDone done;  // Not called yet.
  };

  // Both sides: to be computed, and then given back by Computed() or dropped.
  struct Match {
    Key key;
    Half student;
    Half teacher;
  };

  // What an Offer() comes to. Exactly one of the three: a match, or the half waits, or it does not
  // (`refused` has it back).
  struct Offered {
    std::optional<Match> match;
    std::optional<Half> replaced;  // Of the same side and chunk, from another stream: given up.
    std::optional<Half> refused;   // The stream is not attached (any more).
  };

  // A half that is given up, and the answer to it: an error, or for a teacher's half whose chunk
  // has been computed the answer it waited for.
  struct GivenUp {
    Half half;
    absl::StatusOr<ComputedChunk> answer;
  };

  // `head` is for errors: "head lm".
  Pairing(std::string head, absl::Duration timeout);
  ~Pairing();  // REQUIRES: no stream is attached.
  Pairing(const Pairing&) = delete;
  Pairing& operator=(const Pairing&) = delete;

  // A stream of either side. What it offers stays its own until Detach.
  StreamId Attach();

  // The stream is gone: gives back what it has waiting. What was computed for a student's stream is
  // kept for it to come again, for the timeout.
  std::vector<Half> Detach(StreamId stream);

  // A side of a chunk has arrived and been validated.
  Offered Offer(StreamSide side, const Key& key, Half half, absl::Time now);

  // The match has been computed. Keeps the teacher's half until Received() or EndStream(), unless
  // its stream is gone; a student's half that has come again meanwhile makes a new match.
  Offered Computed(Match match, absl::Time now);

  // The student's client has the result of a chunk. The teacher's half when there is one: kept, or
  // sent again by a teacher whose connection broke.
  std::optional<Half> Received(const Key& key);

  // The student's client has the results of all that was computed for this stream of its.
  std::vector<Half> EndStream(StreamId student);

  // What has waited for longer than the timeout.
  std::vector<GivenUp> Expire(absl::Time now);

  int64_t num_waiting() const;  // Halves, those that are kept included.

  // The answer of a teacher's half.
  static ComputedChunk TeacherAnswer(const ArrivedChunk& chunk, bool duplicate);

 private:
  struct Waiting {
    Half half;
    absl::Time deadline;
  };
  struct Kept {
    Half half;
    StreamId student = 0;  // It was computed for this stream.
    absl::Time deadline;   // Infinite while that is attached.
  };
  // At most one of teacher and kept; student and one of those only within a call.
  struct Entry {
    std::optional<Waiting> student;
    std::optional<Waiting> teacher;
    std::optional<Kept> kept;

    bool empty() const { return !student.has_value() && !teacher.has_value() && !kept.has_value(); }
  };

  std::optional<Match> TakeMatch(const Key& key, Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status MissingSide(const Key& key, StreamSide missing) const;

  const std::string head_;
  const absl::Duration timeout_;
  mutable absl::Mutex mu_;
  StreamId next_stream_ ABSL_GUARDED_BY(mu_) = 1;
  std::set<StreamId> streams_ ABSL_GUARDED_BY(mu_);
  std::map<Key, Entry> entries_ ABSL_GUARDED_BY(mu_);
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_HEAD_PAIRING_H_
