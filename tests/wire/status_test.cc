#include "proto/wire/status.h"

#include <grpc/grpc.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "proto/types/limits.h"
#include "proto/wire/process.h"

namespace lmhead {
namespace {

TEST(Status, EveryCodeAndMessageSurvivesTheRoundTrip) {
  std::set<int> grpc_codes;
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), code == 0 ? "" : "what and why");
    const grpc::Status out = ToGrpcStatus(status);
    EXPECT_EQ(static_cast<int>(out.error_code()), code);  // gRPC's canonical numbers.
    EXPECT_EQ(FromGrpcStatus(out), status);
    grpc_codes.insert(out.error_code());
  }
  EXPECT_EQ(grpc_codes.size(), 17u);
}

TEST(Status, AnUnknownNumberBecomesUnknown) {
  // The largest that the enumeration's bits can hold.
  const grpc::Status odd(static_cast<grpc::StatusCode>(31), "odd");
  EXPECT_EQ(FromGrpcStatus(odd), absl::UnknownError("odd"));
}

TEST(Status, ALongMessageIsCut) {
  const std::string fits(static_cast<size_t>(kStatusMessageBytesMax), 'x');
  EXPECT_EQ(ToGrpcStatus(absl::InternalError(fits)).error_message(), fits);
  const std::string cut = ToGrpcStatus(absl::InternalError(fits + "y")).error_message();
  EXPECT_EQ(cut.size(), fits.size());
  EXPECT_EQ(cut.substr(cut.size() - 4), "x...");
}

TEST(Process, KeepsGrpcInitialized) {
  KeepGrpcInitialized();
  grpc_init();
  grpc_shutdown_blocking();
  EXPECT_TRUE(grpc_is_initialized());
}

}  // namespace
}  // namespace lmhead
