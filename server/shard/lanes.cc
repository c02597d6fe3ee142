#include "server/shard/lanes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/check.h"
#include "proto/types/limits.h"

namespace lmhead {

Lanes::Lanes(int32_t num_lanes, std::function<void()> on_lost)
    : num_lanes_(num_lanes), on_lost_(std::move(on_lost)), waker_([this] { Wake(); }) {}

Lanes::~Lanes() { LMHEAD_CHECK(!waker_.joinable(), "the lanes were not closed"); }

// --- For the owner -----------------------------------------------------------------------------

void Lanes::Send(uint64_t command, Arrays arrays, std::shared_ptr<const void> keep) {
  Outgoing outgoing = {.arrays = std::move(arrays), .keep = std::move(keep)};
  absl::MutexLock lock(&mu_);
  if (!closed_ && outgoing.HasPart()) outgoing_.emplace(command, std::move(outgoing));
}

void Lanes::Expect(uint64_t command, Places places,
                   std::function<void(const absl::Status&)> arrived) {
  uint64_t num_bytes = 0;
  for (const std::span<std::byte> place : places) num_bytes += place.size();
  LMHEAD_CHECK(num_bytes > 0, "nothing is expected");
  absl::Status reason;
  {
    absl::MutexLock lock(&mu_);
    last_known_ = command;
    if (!closed_) {
      incoming_.emplace(command, Incoming{.places = std::move(places),
                                          .arrived = std::move(arrived),
                                          .unclaimed_bytes = num_bytes,
                                          .missing_bytes = num_bytes});
      return;
    }
    reason = loss_;
  }
  arrived(reason.ok() ? absl::UnavailableError("the lanes are closed") : reason);
}

void Lanes::Forget(uint64_t command) {
  // What they keep may end with them: not under the lock.
  std::shared_ptr<const void> keep;
  std::function<void(const absl::Status&)> arrived;
  absl::MutexLock lock(&mu_);
  last_known_ = std::max(last_known_, command);
  if (const auto out = outgoing_.find(command); out != outgoing_.end()) {
    out->second.arrays.clear();
    keep = out->second.keep;
  }
  if (const auto in = incoming_.find(command); in != incoming_.end()) {
    arrived = std::exchange(in->second.arrived, nullptr);
  }
  const auto copied = [this, command]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto out = outgoing_.find(command);
    const auto in = incoming_.find(command);
    return (out == outgoing_.end() || out->second.num_copying == 0) &&
           (in == incoming_.end() || in->second.num_copying == 0);
  };
  mu_.Await(absl::Condition(&copied));
  outgoing_.erase(command);
  incoming_.erase(command);
}

void Lanes::Close(const absl::Status& reason) {
  std::vector<std::shared_ptr<Lane>> lanes, idle;  // Dropped without the lock.
  std::vector<Parked> parked;
  OutgoingMap outgoing;
  std::map<uint64_t, Incoming> incoming;
  {
    absl::MutexLock lock(&mu_);
    if (std::exchange(closed_, true)) return;
    const auto copied = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      const auto is_still = [](const auto& entry) { return entry.second.num_copying == 0; };
      return std::ranges::all_of(outgoing_, is_still) && std::ranges::all_of(incoming_, is_still);
    };
    mu_.Await(absl::Condition(&copied));
    lanes = lanes_;
    idle.swap(idle_);
    parked.swap(parked_);
    outgoing.swap(outgoing_);
    incoming.swap(incoming_);
  }
  waker_.join();
  for (const std::shared_ptr<Lane>& lane : lanes) lane->End();
  for (const auto& [command, each] : incoming) {
    if (each.arrived != nullptr) each.arrived(reason);  // Null: Forget() waits as well.
  }
  absl::MutexLock lock(&mu_);
  all_told_ = true;
}

void Lanes::AwaitEnd() {
  std::vector<std::shared_ptr<Lane>> lanes;  // Dropped without the lock.
  absl::MutexLock lock(&mu_);
  const auto ended = [this]()
                         ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return all_told_ && num_open_ == 0; };
  mu_.Await(absl::Condition(&ended));
  lanes.swap(lanes_);
}

bool Lanes::complete() const {
  absl::MutexLock lock(&mu_);
  return !closed_ && static_cast<int32_t>(lanes_.size()) == num_lanes_;
}

absl::Status Lanes::loss() const {
  absl::MutexLock lock(&mu_);
  return loss_;
}

// --- For the lanes -----------------------------------------------------------------------------

absl::StatusOr<bool> Lanes::Add(std::shared_ptr<Lane> lane) {
  absl::MutexLock lock(&mu_);
  if (closed_) return absl::UnavailableError("the Follow call of this lane has ended");
  if (static_cast<int32_t>(lanes_.size()) == num_lanes_) {
    return absl::FailedPreconditionError(
        absl::StrCat("the Follow call has all of its ", num_lanes_, " lanes"));
  }
  lanes_.push_back(std::move(lane));
  ++num_open_;
  return static_cast<int32_t>(lanes_.size()) == num_lanes_;
}

void Lanes::Leave() {
  absl::MutexLock lock(&mu_);
  --num_open_;
}

void Lanes::Lose(const absl::Status& reason) {
  {
    absl::MutexLock lock(&mu_);
    if (closed_ || !loss_.ok()) return;
    loss_ = reason;
  }
  on_lost_();
}

bool Lanes::Outgoing::HasPart() {
  while (array < arrays.size() && offset == arrays[array].size()) {
    ++array;
    offset = 0;
  }
  return array < arrays.size();
}

// Commands are numbered: the first is the oldest.
Lanes::OutgoingMap::iterator Lanes::FindPart() {
  return std::ranges::find_if(outgoing_, [](auto& entry) { return entry.second.HasPart(); });
}

std::optional<grpc::ByteBuffer> Lanes::NextPart(const std::shared_ptr<Lane>& lane) {
  LanePartHeader header;
  std::span<const std::byte> data;
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return std::nullopt;
    const auto found = FindPart();
    if (found == outgoing_.end()) {
      idle_.push_back(lane);
      return std::nullopt;
    }
    auto& [command, from] = *found;
    header = {.command = command, .array = from.array, .offset = from.offset};
    const std::span<const std::byte> rest = from.arrays[from.array].subspan(from.offset);
    data = rest.first(std::min(rest.size(), static_cast<size_t>(kLanePartBytes)));
    from.offset += data.size();
    ++from.num_copying;
  }
  grpc::ByteBuffer message = EncodeLanePart(header, data);
  std::shared_ptr<const void> keep;  // Dropped without the lock.
  absl::MutexLock lock(&mu_);
  const auto from = outgoing_.find(header.command);
  if (--from->second.num_copying == 0 && !from->second.HasPart()) {
    keep = std::move(from->second.keep);
    outgoing_.erase(from);
  }
  return message;
}

absl::StatusOr<std::span<std::byte>> Lanes::ClaimPlace(const LanePartReader& part) {
  const auto& [command, array, offset] = part.header();
  Incoming& to = incoming_.at(command);
  const uint64_t size = array < to.places.size() ? to.places[array].size() : 0;
  if (offset > size || part.num_bytes() > size - offset || part.num_bytes() > to.unclaimed_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a part of a lane has ", part.num_bytes(), " bytes from byte ", offset,
                     " on of array ", array, " (", size, " bytes) of command ", command,
                     ", all of which lacks ", to.unclaimed_bytes));
  }
  to.unclaimed_bytes -= part.num_bytes();
  ++to.num_copying;
  return to.places[array].subspan(offset, part.num_bytes());
}

absl::StatusOr<bool> Lanes::TakePart(const std::shared_ptr<Lane>& lane, grpc::ByteBuffer* message) {
  std::optional<LanePartReader> part(message);
  if (!part->status().ok()) return part->status();
  const uint64_t command = part->header().command;
  absl::StatusOr<std::span<std::byte>> place;
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return true;
    if (command > last_known_) {
      part.reset();  // Once parked, the message is whose who reads it again.
      parked_.emplace_back(command, lane);
      return false;
    }
    const auto to = incoming_.find(command);
    if (to == incoming_.end() || to->second.arrived == nullptr) return true;  // Forgotten.
    place = ClaimPlace(*part);
    if (!place.ok()) return place.status();
  }
  const absl::Status copied = part->CopyTo(*place);
  std::function<void(const absl::Status&)> arrived;
  {
    absl::MutexLock lock(&mu_);
    const auto to = incoming_.find(command);
    --to->second.num_copying;
    if (!copied.ok()) return copied;
    to->second.missing_bytes -= part->num_bytes();
    if (to->second.missing_bytes == 0) {
      arrived = std::move(to->second.arrived);
      incoming_.erase(to);
    }
  }
  if (arrived) arrived(absl::OkStatus());
  return true;
}

// --- Waking ------------------------------------------------------------------------------------

std::vector<Lanes::Parked>::iterator Lanes::FindParked() {
  return std::ranges::find_if(
      parked_, [known = last_known_](const Parked& parked) { return parked.first <= known; });
}

bool Lanes::CanWrite() { return !idle_.empty() && FindPart() != outgoing_.end(); }

void Lanes::Wake() {
  for (;;) {
    std::shared_ptr<Lane> reader, writer;
    {
      absl::MutexLock lock(&mu_);
      const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return closed_ || CanWrite() || FindParked() != parked_.end();
      };
      mu_.Await(absl::Condition(&ready));
      if (closed_) return;
      if (const auto parked = FindParked(); parked != parked_.end()) {
        reader = std::move(parked->second);
        parked_.erase(parked);
      }
      if (CanWrite()) {
        // The one that has waited longest: all take their turns.
        writer = std::move(idle_.front());
        idle_.erase(idle_.begin());
      }
    }
    if (reader != nullptr) reader->Read();
    if (writer != nullptr) writer->Write();
  }
}

}  // namespace lmhead
