#include "tests/c/c_worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/lmhead.h"

/* The text between the quotes behind `"key": "` or `"key":"`, as a number. */
static unsigned long long NumberOf(const char* json, const char* key) {
  const char* found = strstr(json, key);
  return found == NULL ? 0 : strtoull(found + strlen(key) + strlen("\":\""), NULL, 10);
}

#define CHECK_OK(call)                                            \
  do {                                                            \
    if ((call) != LMHEAD_OK) {                                    \
      snprintf(message, 1024, "%s", lmhead_error_message(error)); \
      lmhead_error_free(error);                                   \
      lmhead_writer_close(writer);                                \
      lmhead_client_close(client);                                \
      return __LINE__;                                            \
    }                                                             \
  } while (0)

int RunCWorker(const char* address, double* loss_sum, float weight[32], char message[1024]) {
  lmhead_error* error = NULL;
  lmhead_client* client = NULL;
  lmhead_writer* writer = NULL;
  char* json = NULL;
  CHECK_OK(lmhead_client_connect(address, NULL, &client, &error));
  CHECK_OK(lmhead_client_call(client, "CreateHead",
                              "{\"spec\": {\"name\": \"lm\", \"vocab_size\": 8, \"hidden_size\": 4,"
                              " \"weight_dtype\": \"DTYPE_FLOAT32\", \"trainable\": true,"
                              " \"optimizer\": {\"kind\": \"OPTIMIZER_KIND_SGD\"}}}",
                              0, &json, &error));
  lmhead_string_free(json);
  for (int i = 0; i < 32; ++i) weight[i] = 0.0f;
  CHECK_OK(lmhead_client_load_weights(client, "lm", LMHEAD_WEIGHT, LMHEAD_FLOAT32, 0, 8, 4, weight,
                                      &error));
  CHECK_OK(lmhead_client_call(client, "BeginStep",
                              "{\"head\": \"lm\", \"step\": 1, \"workers\": [\"c\"]}", 0, &json,
                              &error));
  const unsigned long long incarnation = NumberOf(json, "incarnation");
  lmhead_string_free(json);

  char open[512];
  snprintf(open, sizeof(open),
           "{\"head\": \"lm\", \"step\": 1, \"worker\": \"c\", \"incarnation\": \"%llu\","
           " \"hidden_dtype\": \"DTYPE_FLOAT32\", \"outputs\": {\"grad_hidden_states\": true}}",
           incarnation);
  CHECK_OK(lmhead_writer_open(client, open, NULL, &writer, &error));
  const float hidden[12] = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0};
  const int32_t targets[3] = {2, -100, 5};
  float grad[12];
  lmhead_loss_rows rows = LMHEAD_LOSS_ROWS_INIT;
  rows.num_tokens = 3;
  rows.hidden_size = 4;
  rows.hidden_states = hidden;
  rows.targets = targets;
  rows.grad_hidden_states = grad;
  lmhead_loss_result result = LMHEAD_LOSS_RESULT_INIT;
  uint64_t ticket = 0;
  CHECK_OK(lmhead_writer_submit(writer, &rows, &ticket, &error));
  CHECK_OK(lmhead_writer_wait(writer, ticket, &result, &error));
  CHECK_OK(lmhead_writer_finish(writer, NULL, &error));
  lmhead_writer_close(writer);
  writer = NULL;
  *loss_sum = result.loss_sum;

  char call[256];
  snprintf(call, sizeof(call), "{\"head\": \"lm\", \"step\": 1, \"incarnation\": \"%llu\"}",
           incarnation);
  CHECK_OK(lmhead_client_call(client, "PrepareStep", call, 0, &json, &error));
  lmhead_string_free(json);
  snprintf(call, sizeof(call),
           "{\"head\": \"lm\", \"step\": 1, \"incarnation\": \"%llu\", \"learning_rate\": 1,"
           " \"grad_multiplier\": 0.5}",
           incarnation);
  CHECK_OK(lmhead_client_call(client, "CommitStep", call, 0, &json, &error));
  lmhead_string_free(json);
  CHECK_OK(lmhead_client_read_weights(client, "lm", LMHEAD_WEIGHT, LMHEAD_FLOAT32, 0, 8, 4, weight,
                                      &error));
  lmhead_client_close(client);
  return 0;
}
