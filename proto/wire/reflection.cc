#include "proto/wire/reflection.h"

#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/impl/server_builder_plugin.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace lmhead {
namespace {

constexpr char kPluginName[] = "proto_server_reflection";

class WithoutReflection final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}

  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    plugins->erase(std::remove_if(plugins->begin(), plugins->end(),
                                  [](const auto& plugin) { return plugin->name() == kPluginName; }),
                   plugins->end());
  }
};

}  // namespace

void LeaveReflectionAway(grpc::ServerBuilder* builder) {
  builder->SetOption(std::make_unique<WithoutReflection>());
}

}  // namespace lmhead
