#include "server/rpc/call_guard.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/types/limits.h"
#include "proto/wire/request_id.h"
#include "proto/wire/status.h"
#include "server/logging/logging.h"
#include "server/rpc/method_roles.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

constexpr char kAuthorizationKey[] = "authorization";

std::string RequestId(const grpc::ServerContextBase& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(kRequestIdKey);
  if (found == metadata.end()) return MakeRequestId();
  std::string id(found->second.data(), found->second.size());
  return IsRequestId(id) ? id : MakeRequestId();
}

CallerFacts FactsOf(const grpc::ServerContextBase& context) {
  CallerFacts facts;
  const std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  if (auth != nullptr && auth->IsPeerAuthenticated()) {
    facts.has_certificate = true;
    // Names that a CA vouches for as what they are: no common name, no address.
    for (const char* property : {GRPC_PEER_DNS_PROPERTY_NAME, GRPC_PEER_URI_PROPERTY_NAME}) {
      for (const grpc::string_ref& value : auth->FindPropertyValues(property)) {
        facts.certificate_names.emplace_back(value.data(), value.size());
      }
    }
  }
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(kAuthorizationKey);
  if (found != metadata.end())
    facts.authorization.emplace(found->second.data(), found->second.size());
  return facts;
}

}  // namespace

Call CallGuard::Admit(const grpc::ServerContextBase& context, std::string_view method) const {
  Call call(this, method);
  call.request_id_ = RequestId(context);
  absl::StatusOr<Caller> caller = security_->Identify(FactsOf(context));
  if (caller.ok()) {
    call.caller_ = *std::move(caller);
    call.status_ = security_->CheckRole(call.caller_, method, RolesOf(method));
  } else {
    call.status_ = absl::Status(caller.status().code(),
                                absl::StrCat(std::string(method), ": ", caller.status().message()));
  }
  return call;
}

absl::Status Call::CheckWorker(std::string_view worker) const {
  return guard_->security_->CheckWorker(caller_, method_, worker);
}

absl::Status Call::CheckTakesPart(const std::vector<std::string>& workers) const {
  const Grant& grant = caller_.grant;
  if (grant.MayBe(Role::kAdmin) && (RolesOf(method_) & static_cast<RoleSet>(Role::kAdmin)) != 0) {
    return absl::OkStatus();
  }
  if (std::any_of(workers.begin(), workers.end(),
                  [&](const std::string& worker) { return grant.MaySpeakAs(worker); })) {
    return absl::OkStatus();
  }
  constexpr size_t kNamesShownMax = 8;
  const size_t shown = std::min(workers.size(), kNamesShownMax);
  return CheckWorker(absl::StrCat(
      absl::StrJoin(workers.begin(), workers.begin() + static_cast<std::ptrdiff_t>(shown), " or "),
      shown < workers.size() ? " or others of the step" : ""));
}

absl::Status Call::CheckTakesNew(std::string_view what) const {
  if (!guard_->draining()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("the server is stopping and takes no ",
                                             std::string(what), "; try again when it is back"));
}

grpc::Status Call::ToGrpcStatus(const absl::Status& status) const {
  if (status.ok()) return grpc::Status::OK;
  // The id stays when a long message is cut.
  const std::string tail = absl::StrCat(" [request ", request_id_, "]");
  const grpc::Status cut = lmhead::ToGrpcStatus(status);
  std::string message = cut.error_message();
  const size_t room = kStatusMessageBytesMax - tail.size();
  if (message.size() > room) {
    message.resize(room - 3);
    message += "...";
  }
  return grpc::Status(cut.error_code(), message + tail);
}

}  // namespace lmhead
