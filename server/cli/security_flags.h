// The security flags of `lmhead serve`, which `lmhead doctor` checks as well. The server's own
// certificate is in --tls_cert_file and --tls_key_file of common_flags.h.

#ifndef LMHEAD_SERVER_CLI_SECURITY_FLAGS_H_
#define LMHEAD_SERVER_CLI_SECURITY_FLAGS_H_

#include "server/security/security_config.h"

namespace lmhead {

SecurityConfig SecurityConfigFromFlags();

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CLI_SECURITY_FLAGS_H_
