// Keeps xDS (service meshes) out of the portable executable: half of gRPC's archive, which lmhead
// does not use.
//
// gRPC's registry calls this function to add its optional plugins. Defining it here, before the
// archive is searched, leaves the archive's own definition, and all that only it refers to,
// unlinked.

namespace grpc_core {

class CoreConfiguration {
 public:
  class Builder;
};

void RegisterExtraFilters(CoreConfiguration::Builder* builder);
void RegisterExtraFilters(CoreConfiguration::Builder* builder) {}

}  // namespace grpc_core
