// Chunks and results with random contents, and their bytes.

#ifndef LMHEAD_TESTS_WIRE_WIRE_TEST_UTIL_H_
#define LMHEAD_TESTS_WIRE_WIRE_TEST_UTIL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "lmhead/v1/loss.pb.h"
#include "proto/wire/chunk_codec.h"

namespace lmhead {

// All bytes of a buffer in order.
inline std::string BytesOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) return "no buffer";
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

// A buffer of slices of `slice_bytes` each, as a network would deliver it.
inline grpc::ByteBuffer BufferOf(const std::string& bytes, size_t slice_bytes) {
  std::vector<grpc::Slice> slices;
  for (size_t start = 0; start < bytes.size(); start += slice_bytes) {
    slices.emplace_back(bytes.substr(start, slice_bytes));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// A 64-byte aligned buffer of exactly `bytes` bytes, so that a sanitizer sees a step beyond it.
class Destination {
 public:
  explicit Destination(size_t bytes)
      : data_(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{64}))),
        bytes_(bytes) {
    std::memset(data_, 0xcd, bytes);
  }
  ~Destination() { ::operator delete (data_, std::align_val_t{64}); }
  Destination(const Destination&) = delete;
  Destination& operator=(const Destination&) = delete;

  std::span<std::byte> span() { return {data_, bytes_}; }

 private:
  std::byte* data_;
  size_t bytes_;
};

using Random = std::mt19937_64;

inline bool Coin(Random& random) { return (random() & 1) != 0; }

template <typename T>
void FillBytes(Random& random, T* elements, size_t count) {
  std::vector<uint8_t> bytes(count * sizeof(T));
  std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<uint8_t>(random()); });
  if (!bytes.empty()) std::memcpy(elements, bytes.data(), bytes.size());
}

template <typename Field>
void AddElements(Random& random, int64_t count, Field* field) {
  field->Resize(static_cast<int>(count), 0);
  FillBytes(random, field->mutable_data(), static_cast<size_t>(count));
}

inline std::string RandomBytes(Random& random, int64_t count) {
  std::string bytes(static_cast<size_t>(count), '\0');
  FillBytes(random, bytes.data(), bytes.size());
  return bytes;
}

// Any subset of the fields; valid by DecodeRequest's guarantees, without a checksum.
inline v1::Chunk RandomChunk(Random& random, int64_t num_tokens, int64_t row_bytes) {
  v1::Chunk chunk;
  chunk.set_chunk_index(Coin(random) ? random() >> (random() % 64) : 0);
  chunk.set_num_tokens(num_tokens);
  if (Coin(random)) chunk.set_grad_scale(static_cast<float>(random() % 100) / 7.0f);
  if (Coin(random)) AddElements(random, num_tokens, chunk.mutable_targets());
  if (Coin(random)) AddElements(random, num_tokens, chunk.mutable_token_weights());
  if (Coin(random)) AddElements(random, num_tokens, chunk.mutable_token_temperature());
  if (Coin(random)) AddElements(random, num_tokens, chunk.mutable_logprob_grad());
  if (Coin(random)) AddElements(random, num_tokens, chunk.mutable_entropy_grad());
  if (Coin(random)) AddElements(random, num_tokens, chunk.mutable_old_logprob());
  if (Coin(random)) AddElements(random, num_tokens, chunk.mutable_advantage());
  if (Coin(random)) {
    AddElements(random, 3 * num_tokens, chunk.mutable_topk_ids());
    AddElements(random, 3 * num_tokens, chunk.mutable_topk_logprobs());
  }
  if (Coin(random)) AddElements(random, num_tokens, chunk.mutable_reference_logprob());
  if (Coin(random)) {
    chunk.set_teacher_hidden_states(RandomBytes(random, 2 * row_bytes * num_tokens));
  }
  if (random() % 8 != 0) chunk.set_hidden_states(RandomBytes(random, row_bytes * num_tokens));
  return chunk;
}

// Spans into `chunk`.
inline ChunkView ViewOfMessage(const v1::Chunk& chunk) {
  const auto elements = [](const auto& field) {
    return std::span(field.data(), static_cast<size_t>(field.size()));
  };
  ChunkView view;
  view.chunk_index = chunk.chunk_index();
  view.num_tokens = chunk.num_tokens();
  if (chunk.has_grad_scale()) view.grad_scale = chunk.grad_scale();
  if (chunk.has_checksum()) view.checksum = chunk.checksum();
  view.targets = elements(chunk.targets());
  view.token_weights = elements(chunk.token_weights());
  view.token_temperature = elements(chunk.token_temperature());
  view.logprob_grad = elements(chunk.logprob_grad());
  view.entropy_grad = elements(chunk.entropy_grad());
  view.old_logprob = elements(chunk.old_logprob());
  view.advantage = elements(chunk.advantage());
  view.topk_ids = elements(chunk.topk_ids());
  view.topk_logprobs = elements(chunk.topk_logprobs());
  view.reference_logprob = elements(chunk.reference_logprob());
  view.teacher_hidden_states = std::as_bytes(std::span(chunk.teacher_hidden_states()));
  view.hidden_states = std::as_bytes(std::span(chunk.hidden_states()));
  return view;
}

// A message with the contents of `view`, for comparing.
inline v1::Chunk MessageOf(const ChunkView& view) {
  v1::Chunk chunk;
  chunk.set_chunk_index(view.chunk_index);
  chunk.set_num_tokens(view.num_tokens);
  if (view.grad_scale.has_value()) chunk.set_grad_scale(*view.grad_scale);
  if (view.checksum.has_value()) chunk.set_checksum(*view.checksum);
  const auto add = [](const auto& elements, auto* field) {
    field->Add(elements.begin(), elements.end());
  };
  add(view.targets, chunk.mutable_targets());
  add(view.token_weights, chunk.mutable_token_weights());
  add(view.token_temperature, chunk.mutable_token_temperature());
  add(view.logprob_grad, chunk.mutable_logprob_grad());
  add(view.entropy_grad, chunk.mutable_entropy_grad());
  add(view.old_logprob, chunk.mutable_old_logprob());
  add(view.advantage, chunk.mutable_advantage());
  add(view.topk_ids, chunk.mutable_topk_ids());
  add(view.topk_logprobs, chunk.mutable_topk_logprobs());
  add(view.reference_logprob, chunk.mutable_reference_logprob());
  chunk.mutable_teacher_hidden_states()->assign(
      reinterpret_cast<const char*>(view.teacher_hidden_states.data()),
      view.teacher_hidden_states.size());
  chunk.mutable_hidden_states()->assign(reinterpret_cast<const char*>(view.hidden_states.data()),
                                        view.hidden_states.size());
  return chunk;
}

inline std::string RequestBytes(const v1::Chunk& chunk) {
  v1::ComputeLossRequest request;
  *request.mutable_chunk() = chunk;
  return request.SerializeAsString();
}

}  // namespace lmhead

#endif  // LMHEAD_TESTS_WIRE_WIRE_TEST_UTIL_H_
