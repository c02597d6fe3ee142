#include "server/cli/common_flags.h"

#include "absl/flags/flag.h"

ABSL_FLAG(
    std::string, address, "",
    "Service to talk to, host:port or unix:/path. When empty, demo and lmhead-bench start one "
    "of their own, and estimate plans without one.");
ABSL_FLAG(std::string, backend, "auto",
          "What computes: cpu, cuda, or auto for the GPU when there is one. (estimate: auto plans "
          "for the GPU.)");
ABSL_FLAG(int64_t, batch_tokens, 0,
          "Most rows one launch computes, for heads that do not say. 0: 1024 on the CPU, 4096 on "
          "the GPU.");
ABSL_FLAG(std::string, dtype, "",
          "Of the weight and the hidden states: float32 (fp32) or bfloat16 (bf16). Default: bf16, "
          "for lmhead-bench golden fp32.");
ABSL_FLAG(int64_t, hidden, 0,
          "Hidden size, columns of the weight. Default of demo: 128; of lmhead-bench service: 256, "
          "on a GPU 4096, as of kernel.");
ABSL_FLAG(bool, json, false, "Print one JSON object for machines to read.");
ABSL_FLAG(int64_t, memory_limit_bytes, 0,
          "Bytes that all heads together may take. 0: serve takes 80% of what the machine or "
          "container has; estimate takes no bound.");
ABSL_FLAG(int32_t, ranks, 0,
          "Ranks that the vocabulary rows of every head are split over, in each of --replicas a "
          "part of them. 0: one a replica; of serve one for each of --devices; of estimate "
          "--address as many as the service has.");
ABSL_FLAG(std::optional<int32_t>, replicas, std::nullopt,
          "Replicas of every head that the ranks form, each with all of its rows on --ranks / "
          "--replicas ranks: batches are spread over them, gradients are summed at the end of the "
          "step. Divides --ranks. Default: 1; of estimate --address as many as the service has.");
ABSL_FLAG(std::string, tls_ca_file, "",
          "PEM file of the certificate authorities that the service's certificate is checked "
          "against; switches TLS on.");
ABSL_FLAG(std::string, tls_cert_file, "",
          "PEM file of this end's certificate, followed by its intermediates. serve: the server's, "
          "switches TLS on; others: the client's, for services that demand one.");
ABSL_FLAG(std::string, tls_key_file, "", "PEM file of the private key of --tls_cert_file.");
ABSL_FLAG(std::string, tls_server_name, "",
          "Name that the service's certificate must have. Empty: the host of --address.");
ABSL_FLAG(std::string, token_file, "",
          "File with the token to send as `authorization: Bearer`; over TLS only.");
ABSL_FLAG(int64_t, vocab, 0,
          "Vocabulary size, rows of the weight. Default of lmhead-bench service: 8192, on a GPU "
          "131072.");

namespace lmhead {

std::string AddressFromFlags() {
  const std::string address = absl::GetFlag(FLAGS_address);
  return address.empty() ? "127.0.0.1:50051" : address;
}

ClientOptions ClientOptionsFromFlags() {
  ClientOptions options;
  options.credentials = {.tls_ca_file = absl::GetFlag(FLAGS_tls_ca_file),
                         .tls_cert_file = absl::GetFlag(FLAGS_tls_cert_file),
                         .tls_key_file = absl::GetFlag(FLAGS_tls_key_file),
                         .tls_server_name = absl::GetFlag(FLAGS_tls_server_name),
                         .token_file = absl::GetFlag(FLAGS_token_file)};
  return options;
}

}  // namespace lmhead
