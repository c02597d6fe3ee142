#include "proto/wire/request_id.h"

#include <algorithm>
#include <cstdint>

#include "absl/random/random.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace lmhead {
namespace {

constexpr size_t kRequestIdLengthMax = 128;

}  // namespace

bool IsRequestId(std::string_view id) {
  return !id.empty() && id.size() <= kRequestIdLengthMax &&
         std::all_of(id.begin(), id.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
                  std::string_view("._:/-").find(c) != std::string_view::npos;
         });
}

std::string MakeRequestId() {
  thread_local absl::InsecureBitGen random;
  return absl::StrCat(absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16));
}

}  // namespace lmhead
