// The id that a client gives a call, so that its way can be found in the logs of both ends and in
// the errors that come back: metadata `x-request-id`.

#ifndef LMHEAD_PROTO_WIRE_REQUEST_ID_H_
#define LMHEAD_PROTO_WIRE_REQUEST_ID_H_

#include <string>
#include <string_view>

namespace lmhead {

inline constexpr char kRequestIdKey[] = "x-request-id";

// Whether a text may be one: 1 to 128 characters of [A-Za-z0-9._:/-], which go into logs as they
// are.
bool IsRequestId(std::string_view id);

// 16 random hexadecimal digits.
std::string MakeRequestId();

}  // namespace lmhead

#endif  // LMHEAD_PROTO_WIRE_REQUEST_ID_H_
