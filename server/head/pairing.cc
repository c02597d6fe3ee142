#include "server/head/pairing.h"

#include "absl/strings/str_cat.h"
#include "proto/types/check.h"

namespace lmhead {

Pairing::Pairing(std::string head, absl::Duration timeout)
    : head_(std::move(head)), timeout_(timeout) {}

Pairing::~Pairing() {
  absl::MutexLock lock(&mu_);
  LMHEAD_CHECK(streams_.empty(), absl::StrCat(streams_.size(), " streams are still attached"));
}

ComputedChunk Pairing::TeacherAnswer(const ArrivedChunk& chunk, bool duplicate) {
  return {.chunk_index = chunk.chunk_index, .num_tokens = chunk.num_tokens, .duplicate = duplicate};
}

Pairing::StreamId Pairing::Attach() {
  absl::MutexLock lock(&mu_);
  streams_.insert(next_stream_);
  return next_stream_++;
}

std::vector<Pairing::Half> Pairing::Detach(StreamId stream) {
  std::vector<Half> halves;
  const auto take = [&](auto& place) {
    if (!place.has_value() || place->half.stream_id != stream) return;
    halves.push_back(std::move(place->half));
    place.reset();
  };
  absl::MutexLock lock(&mu_);
  if (streams_.erase(stream) == 0) return halves;
  const absl::Time deadline = absl::Now() + timeout_;
  for (auto it = entries_.begin(); it != entries_.end();) {
    Entry& entry = it->second;
    take(entry.student);
    take(entry.teacher);
    take(entry.kept);
    if (entry.kept.has_value() && entry.kept->student == stream) entry.kept->deadline = deadline;
    it = entry.empty() ? entries_.erase(it) : std::next(it);
  }
  return halves;
}

std::optional<Pairing::Match> Pairing::TakeMatch(const Key& key, Entry& entry) {
  if (!entry.student.has_value()) return std::nullopt;
  std::optional<Match> match;
  if (entry.teacher.has_value()) {
    match = Match{key, std::move(entry.student->half), std::move(entry.teacher->half)};
  } else if (entry.kept.has_value()) {
    match = Match{key, std::move(entry.student->half), std::move(entry.kept->half)};
  }
  if (match.has_value()) entries_.erase(entries_.find(key));
  return match;
}

Pairing::Offered Pairing::Offer(StreamSide side, const Key& key, Half half, absl::Time now) {
  Offered offered;
  absl::MutexLock lock(&mu_);
  if (!streams_.contains(half.stream_id)) {
    offered.refused = std::move(half);
    return offered;
  }
  Entry& entry = entries_[key];
  std::optional<Waiting>& place = side == StreamSide::kStudent ? entry.student : entry.teacher;
  if (place.has_value()) offered.replaced = std::move(place->half);
  if (side == StreamSide::kTeacher && entry.kept.has_value()) {
    offered.replaced = std::move(entry.kept->half);
    entry.kept.reset();
  }
  place = Waiting{std::move(half), now + timeout_};
  offered.match = TakeMatch(key, entry);
  return offered;
}

Pairing::Offered Pairing::Computed(Match match, absl::Time now) {
  Offered offered;
  absl::MutexLock lock(&mu_);
  Entry& entry = entries_[match.key];
  // A teacher's half that has come again meanwhile takes its place.
  if (entry.teacher.has_value() || !streams_.contains(match.teacher.stream_id)) {
    offered.refused = std::move(match.teacher);
  } else {
    const StreamId student = match.student.stream_id;
    entry.kept = Kept{std::move(match.teacher), student,
                      streams_.contains(student) ? absl::InfiniteFuture() : now + timeout_};
  }
  offered.match = TakeMatch(match.key, entry);
  if (!offered.match.has_value() && entry.empty()) entries_.erase(match.key);
  return offered;
}

std::optional<Pairing::Half> Pairing::Received(const Key& key) {
  std::optional<Half> half;
  absl::MutexLock lock(&mu_);
  const auto it = entries_.find(key);
  if (it == entries_.end()) return half;
  Entry& entry = it->second;
  if (entry.kept.has_value()) {
    half = std::move(entry.kept->half);
    entry.kept.reset();
  } else if (entry.teacher.has_value()) {
    half = std::move(entry.teacher->half);
    entry.teacher.reset();
  }
  if (entry.empty()) entries_.erase(it);
  return half;
}

std::vector<Pairing::Half> Pairing::EndStream(StreamId student) {
  std::vector<Half> halves;
  absl::MutexLock lock(&mu_);
  for (auto it = entries_.begin(); it != entries_.end();) {
    Entry& entry = it->second;
    if (entry.kept.has_value() && entry.kept->student == student) {
      halves.push_back(std::move(entry.kept->half));
      entry.kept.reset();
    }
    it = entry.empty() ? entries_.erase(it) : std::next(it);
  }
  return halves;
}

std::vector<Pairing::GivenUp> Pairing::Expire(absl::Time now) {
  std::vector<GivenUp> given_up;
  absl::MutexLock lock(&mu_);
  for (auto it = entries_.begin(); it != entries_.end();) {
    const Key& key = it->first;
    Entry& entry = it->second;
    if (entry.student.has_value() && now >= entry.student->deadline) {
      given_up.push_back({std::move(entry.student->half), MissingSide(key, StreamSide::kTeacher)});
      entry.student.reset();
    }
    if (entry.teacher.has_value() && now >= entry.teacher->deadline) {
      given_up.push_back({std::move(entry.teacher->half), MissingSide(key, StreamSide::kStudent)});
      entry.teacher.reset();
    }
    // The student's program is gone, with or without the result; the chunk itself is counted.
    if (entry.kept.has_value() && now >= entry.kept->deadline) {
      const ComputedChunk answer = TeacherAnswer(entry.kept->half.chunk, /*duplicate=*/false);
      given_up.push_back({std::move(entry.kept->half), answer});
      entry.kept.reset();
    }
    it = entry.empty() ? entries_.erase(it) : std::next(it);
  }
  return given_up;
}

absl::Status Pairing::MissingSide(const Key& key, StreamSide missing) const {
  const bool teacher = missing == StreamSide::kTeacher;
  return absl::DeadlineExceededError(
      absl::StrCat("chunk ", key.chunk_index, " of worker ", key.worker,
                   key.step == 0 ? std::string() : absl::StrCat(" in step ", key.step), " of ",
                   head_, ": the ", teacher ? "teacher's" : "student's", " side has not come for ",
                   absl::FormatDuration(timeout_), " (--pair_timeout_seconds); see whether the ",
                   teacher ? "teacher's program" : "student's program",
                   " runs, and sends its chunks under this worker's name"));
}

int64_t Pairing::num_waiting() const {
  absl::MutexLock lock(&mu_);
  int64_t count = 0;
  for (const auto& [key, entry] : entries_) {
    count += (entry.student.has_value() ? 1 : 0) + (entry.teacher.has_value() ? 1 : 0) +
             (entry.kept.has_value() ? 1 : 0);
  }
  return count;
}

}  // namespace lmhead
