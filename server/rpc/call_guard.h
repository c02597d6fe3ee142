// What every call passes first: its request id, who calls, whether they may, and whether the server
// still takes new work.

#ifndef LMHEAD_SERVER_RPC_CALL_GUARD_H_
#define LMHEAD_SERVER_RPC_CALL_GUARD_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <atomic>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "server/security/security.h"

namespace lmhead {

class CallGuard;

// One call or stream. Thread-safe: it does not change.
class Call {
 public:
  // OK when the caller may call the method. UNAUTHENTICATED or PERMISSION_DENIED otherwise.
  const absl::Status& status() const { return status_; }
  // The client's, or a random one when it sent none that is valid (proto/wire/request_id.h).
  const std::string& request_id() const { return request_id_; }
  const std::string& caller_name() const { return caller_.name; }

  // PERMISSION_DENIED unless the caller may speak as `worker`.
  absl::Status CheckWorker(std::string_view worker) const;

  // PERMISSION_DENIED unless the caller takes part in a step of these workers, or is an admin where
  // the method allows it.
  absl::Status CheckTakesPart(const std::vector<std::string>& workers) const;

  // UNAVAILABLE once the server drains; `what` is what is not begun any more, such as "a new step".
  absl::Status CheckTakesNew(std::string_view what) const;

  // The status for the wire, with the request id at the end of an error's message.
  grpc::Status ToGrpcStatus(const absl::Status& status) const;

 private:
  friend class CallGuard;
  Call(const CallGuard* guard, std::string_view method) : guard_(guard), method_(method) {}

  const CallGuard* guard_;
  std::string method_;
  std::string request_id_;
  absl::Status status_;
  Caller caller_;
};

// Thread-safe.
class CallGuard {
 public:
  // `security` outlives the guard.
  explicit CallGuard(const Security* security) : security_(security) {}

  // Looks at a call that has come for `method` ("BeginStep"). Never blocks.
  Call Admit(const grpc::ServerContextBase& context, std::string_view method) const;

  // From now on new steps and heads are refused; what is open goes on.
  void StartDraining() { draining_.store(true); }
  bool draining() const { return draining_.load(); }

 private:
  friend class Call;

  const Security* const security_;
  std::atomic<bool> draining_{false};
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_RPC_CALL_GUARD_H_
