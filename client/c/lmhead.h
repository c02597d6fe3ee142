/* The C interface of the lmhead client: for trainers in any language.
 *
 *   lmhead_client* client;
 *   lmhead_client_connect("localhost:50051", NULL, &client, &error);
 *   lmhead_client_call(client, "BeginStep", "{\"head\": \"lm\", \"step\": 1, ...}", 0, &json,
 * &error); lmhead_writer_open(client, "{\"head\": \"lm\", \"step\": 1, ...}", NULL, &writer,
 * &error); lmhead_writer_submit(writer, &rows, &ticket, &error);   // borrows the rows ...
 *   lmhead_writer_wait(writer, ticket, &result, &error);    // ... until here; gradients are in
 * place lmhead_writer_finish(writer, &num_chunks, &error); lmhead_client_call(client,
 * "PrepareStep", ...); lmhead_client_call(client, "CommitStep", ...);
 *
 * Conventions:
 *  1. Functions return a status code: LMHEAD_OK, or one of gRPC's. `error` may be NULL; else it is
 *     set to NULL on success and to an object with the code and the text on failure, to be freed
 *     with lmhead_error_free(). No exception and no signal ever leaves the library.
 *  2. A pointer that must not be NULL and is, is LMHEAD_INVALID_ARGUMENT naming it. Outputs are
 *     written on success only.
 *  3. Control calls take and give protobuf's JSON of the messages in lmhead/v1/service.proto
 * (64-bit integers are strings there). Text is UTF-8, ends with a zero byte, is borrowed for the
 * call on the way in, and freed with lmhead_string_free() on the way out.
 *  4. Structs start with struct_size, which the caller sets to sizeof: the LMHEAD_..._INIT macros
 * do, with every default. Fields are only ever added at the end, so a caller compiled against an
 *     older header goes on working; one compiled against a newer header gets LMHEAD_UNIMPLEMENTED
 *     when it uses a field that the library does not know.
 *  5. Every function may be called by any thread at any time, also the same object by several, but
 *     nothing else may use an object while it is closed or after. A writer may outlive its client.
 *  6. Do not fork() after lmhead_client_connect(): threads do not survive it. Fork first, or exec.
 */

#ifndef LMHEAD_CLIENT_C_LMHEAD_H_
#define LMHEAD_CLIENT_C_LMHEAD_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define LMHEAD_API __attribute__((visibility("default")))
#else
#define LMHEAD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The major number changes when something is taken away, the minor one when something is added. */
#define LMHEAD_API_VERSION_MAJOR 1
#define LMHEAD_API_VERSION_MINOR 0

/* The interface version of the library at run time. A caller needs an equal major number and at
 * least its own minor number. */
LMHEAD_API void lmhead_api_version(int32_t* major, int32_t* minor);

/* Release of the library, such as "0.1.0". Not to be freed. */
LMHEAD_API const char* lmhead_version(void);

/* --- Errors ----------------------------------------------------------------------------------- */

/* gRPC's numbers. */
enum {
  LMHEAD_OK = 0,
  LMHEAD_CANCELLED = 1,
  LMHEAD_UNKNOWN = 2,
  LMHEAD_INVALID_ARGUMENT = 3,
  LMHEAD_DEADLINE_EXCEEDED = 4,
  LMHEAD_NOT_FOUND = 5,
  LMHEAD_ALREADY_EXISTS = 6,
  LMHEAD_PERMISSION_DENIED = 7,
  LMHEAD_RESOURCE_EXHAUSTED = 8,
  LMHEAD_FAILED_PRECONDITION = 9,
  LMHEAD_ABORTED = 10,
  LMHEAD_OUT_OF_RANGE = 11,
  LMHEAD_UNIMPLEMENTED = 12,
  LMHEAD_INTERNAL = 13,
  LMHEAD_UNAVAILABLE = 14,
  LMHEAD_DATA_LOSS = 15,
  LMHEAD_UNAUTHENTICATED = 16
};
typedef int32_t lmhead_status;

typedef struct lmhead_error lmhead_error;
LMHEAD_API lmhead_status lmhead_error_code(const lmhead_error* error);  /* NULL: LMHEAD_OK */
LMHEAD_API const char* lmhead_error_message(const lmhead_error* error); /* NULL: "" */
LMHEAD_API void lmhead_error_free(lmhead_error* error);                 /* NULL: nothing */
LMHEAD_API void lmhead_string_free(char* text);                         /* NULL: nothing */

/* --- The client ------------------------------------------------------------------------------- */

/* A connection to one server. */
typedef struct lmhead_client lmhead_client;

typedef struct lmhead_client_options {
  size_t struct_size;
  double connect_timeout_seconds; /* Of the first connection, and of each one after a break. */
  double call_timeout_seconds;    /* Of a control call; PrepareStep adds its own wait. */
  int32_t max_attempts;           /* Of a call or a stream, after LMHEAD_UNAVAILABLE. */
  int32_t reserved;               /* 0 */
  /* Texts, borrowed for the call; NULL or "" is none. */
  const char* tls_ca_file;   /* PEM; set: TLS, and the service must have a certificate of these. */
  const char* tls_cert_file; /* PEM, with intermediates; for services that demand a certificate. */
  const char* tls_key_file;  /* PEM; set exactly when tls_cert_file is. */
  const char* tls_server_name; /* Name the certificate must have; none: the address's host. */
  const char* token_file;      /* Sent as `authorization: Bearer`; needs TLS. */
  const char* request_id;      /* Goes with every call into the server's log; none: a random one. */
} lmhead_client_options;
#define LMHEAD_CLIENT_OPTIONS_INIT                                                 \
  {                                                                                \
    .struct_size = sizeof(lmhead_client_options), .connect_timeout_seconds = 10.0, \
    .call_timeout_seconds = 60.0, .max_attempts = 5                                \
  }

/* Connects to `host:port`, `ipv4:...`, `ipv6:...`, `dns:///...` or `unix:/path` and asks the server
 * who it is. `options` may be NULL: the defaults. LMHEAD_UNAVAILABLE when nobody answers in time.
 */
LMHEAD_API lmhead_status lmhead_client_connect(const char* address,
                                               const lmhead_client_options* options,
                                               lmhead_client** client, lmhead_error** error);
LMHEAD_API void lmhead_client_close(lmhead_client* client); /* NULL: nothing */

/* Makes the unary call `method` of lmhead.v1.LmHeadService ("CreateHead", "BeginStep", ...) and
 * waits for its answer. NULL or "" is an empty request. timeout_seconds 0: the client's. Calls that
 * may be repeated are, after LMHEAD_UNAVAILABLE. LMHEAD_INVALID_ARGUMENT when the JSON is not that
 * of the request. */
LMHEAD_API lmhead_status lmhead_client_call(lmhead_client* client, const char* method,
                                            const char* request_json, double timeout_seconds,
                                            char** response_json, lmhead_error** error);

/* lmhead.v1.DType. */
enum { LMHEAD_FLOAT32 = 1, LMHEAD_BFLOAT16 = 2, LMHEAD_FLOAT16 = 3 };

/* lmhead.v1.TensorKind. */
enum {
  LMHEAD_WEIGHT = 1,       /* [vocab_size, hidden_size] */
  LMHEAD_BIAS = 2,         /* [vocab_size, 1] */
  LMHEAD_GRAD_WEIGHT = 3,  /* [vocab_size, hidden_size], float32; read only */
  LMHEAD_GRAD_BIAS = 4,    /* [vocab_size, 1], float32; read only */
  LMHEAD_MASTER_WEIGHT = 5 /* [vocab_size, hidden_size], float32; read only */
};

/* Sends rows [row_start, row_start + num_rows) of a tensor of the head, row-major and dense. */
LMHEAD_API lmhead_status lmhead_client_load_weights(lmhead_client* client, const char* head,
                                                    int32_t tensor, int32_t dtype,
                                                    int64_t row_start, int64_t num_rows,
                                                    int64_t num_columns, const void* rows,
                                                    lmhead_error** error);

/* Reads such rows. LMHEAD_INVALID_ARGUMENT when `dtype` is not the tensor's. */
LMHEAD_API lmhead_status lmhead_client_read_weights(lmhead_client* client, const char* head,
                                                    int32_t tensor, int32_t dtype,
                                                    int64_t row_start, int64_t num_rows,
                                                    int64_t num_columns, void* rows,
                                                    lmhead_error** error);

/* Adds a gradient that the trainer computed (tied embeddings) to the open step: float32 rows
 * [num_rows, num_columns]; of vocabulary rows row_ids[0..num_rows), distinct, or when row_ids is
 * NULL of rows row_start and on. Sent in pieces of about 4 MiB with the indices first_index and on,
 * which are the worker's own count within the step: *num_pieces says how many were used. Repeating
 * the call with the same contents adds nothing twice. */
LMHEAD_API lmhead_status lmhead_client_accumulate_weight_gradient(
    lmhead_client* client, const char* head, uint64_t step, uint64_t incarnation,
    const char* worker, uint64_t first_index, int64_t row_start, const int32_t* row_ids,
    int64_t num_rows, int64_t num_columns, const float* rows, uint64_t* num_pieces,
    lmhead_error** error);

/* --- The step writer -------------------------------------------------------------------------- */

/* The streams of one worker in one step, or of an evaluation. */
typedef struct lmhead_writer lmhead_writer;

typedef struct lmhead_writer_options {
  size_t struct_size;
  int32_t num_connections;     /* TCP connections, each with a stream. */
  int32_t max_inflight_chunks; /* On each; the server's own bound wins when it is lower. */
  int64_t chunk_bytes;         /* Of a message: hidden states, teachers; whole rows. */
  int64_t chunk_tokens;        /* Rows of a message instead; 0: as chunk_bytes says. Needed on both
                                  sides of a paired stream. */
  int32_t send_checksums;      /* 1: the server verifies what arrived. */
  int32_t reserved;            /* 0 */
} lmhead_writer_options;
#define LMHEAD_WRITER_OPTIONS_INIT                                                                \
  {                                                                                               \
    .struct_size = sizeof(lmhead_writer_options), .num_connections = 1, .max_inflight_chunks = 4, \
    .chunk_bytes = 4 << 20, .send_checksums = 1                                                   \
  }

/* Opens the streams. `open_json` is lmhead.v1.StreamOpen: head, step (0: evaluation, no weight
 * gradient), worker, incarnation, hidden_dtype, recipe, outputs, teacher_side. `options` may be
 * NULL. */
LMHEAD_API lmhead_status lmhead_writer_open(lmhead_client* client, const char* open_json,
                                            const lmhead_writer_options* options,
                                            lmhead_writer** writer, lmhead_error** error);

/* Rows and the places for their results, all borrowed until lmhead_writer_wait() returns for their
 * ticket (or finish, cancel or close returns). After an error the outputs are undefined. An input
 * is given exactly when the recipe asks for it, a place exactly when `outputs` does; NULL
 * otherwise. */
typedef struct lmhead_loss_rows {
  size_t struct_size;
  int64_t num_tokens;
  int64_t hidden_size;
  int32_t hidden_dtype;           /* As the writer was opened. */
  float grad_scale;               /* d objective / d token loss, known before the forward pass. */
  const void* hidden_states;      /* [num_tokens, hidden_size] */
  const int32_t* targets;         /* [num_tokens]: a vocabulary id, or the recipe's ignore_index */
  const float* token_weights;     /* [num_tokens] */
  const float* token_temperature; /* [num_tokens] */
  void* grad_hidden_states;       /* [num_tokens, hidden_size], hidden_dtype */
  float* token_loss;              /* [num_tokens] */
  float* logprob;                 /* [num_tokens] */
  float* lse;                     /* [num_tokens] */
  float* entropy;                 /* [num_tokens] */
  int32_t* argmax;                /* [num_tokens] */
  /* Policy losses. */
  const float* logprob_grad;      /* [num_tokens] */
  const float* entropy_grad;      /* [num_tokens] */
  const float* old_logprob;       /* [num_tokens] */
  const float* advantage;         /* [num_tokens] */
  const float* reference_logprob; /* [num_tokens] */
  /* Distillation. */
  const void* teacher_hidden_states; /* [num_tokens, teacher_hidden_size], teacher_hidden_dtype */
  int64_t teacher_hidden_size;
  int32_t teacher_hidden_dtype;
  int32_t teacher_top_k;              /* Columns of the two below. */
  const int32_t* teacher_topk_ids;    /* [num_tokens, teacher_top_k] */
  const float* teacher_topk_logprobs; /* [num_tokens, teacher_top_k] */
  /* Outputs of the student's top k. */
  int32_t* topk_ids;    /* [num_tokens, outputs.top_k] */
  float* topk_logprobs; /* [num_tokens, outputs.top_k] */
} lmhead_loss_rows;
#define LMHEAD_LOSS_ROWS_INIT \
  { .struct_size = sizeof(lmhead_loss_rows), .hidden_dtype = LMHEAD_FLOAT32, .grad_scale = 1.0f }

/* Sums over the rows, never means; lmhead.v1.LossSums has the definitions. */
typedef struct lmhead_loss_result {
  size_t struct_size;
  double loss_sum;
  int64_t num_tokens;
  int64_t num_valid_tokens;
  int64_t num_nonfinite_rows;
  int64_t num_correct;
  double weight_sum;
  double cross_entropy_sum;
  double z_loss_sum;
  double divergence_sum;
  double entropy_sum;
  double policy_sum;
  double dropped_teacher_mass_sum;
  int64_t num_clipped;
  double old_policy_kl_sum;
  int64_t num_chunks;
  int64_t num_duplicates; /* Chunks the server had counted before. */
  double queue_seconds;   /* These four: sums over the chunks. */
  double upload_seconds;
  double compute_seconds;
  double download_seconds;
} lmhead_loss_result;
#define LMHEAD_LOSS_RESULT_INIT \
  { .struct_size = sizeof(lmhead_loss_result) }

/* Cuts the rows into chunks and sends them. Blocks while the window of chunks in flight is full.
 * After an error the rows are the caller's again. */
LMHEAD_API lmhead_status lmhead_writer_submit(lmhead_writer* writer, const lmhead_loss_rows* rows,
                                              uint64_t* ticket, lmhead_error** error);

/* Blocks until every chunk of the ticket has its result; once a ticket. `result` may be NULL. After
 * an error every later call returns that error: LMHEAD_ABORTED when the step must begin again. */
LMHEAD_API lmhead_status lmhead_writer_wait(lmhead_writer* writer, uint64_t ticket,
                                            lmhead_loss_result* result, lmhead_error** error);

/* Submit and wait. */
LMHEAD_API lmhead_status lmhead_writer_compute(lmhead_writer* writer, const lmhead_loss_rows* rows,
                                               lmhead_loss_result* result, lmhead_error** error);

/* Waits for everything submitted and tells the server this worker's chunk count, *num_chunks
 * (may be NULL). No submit afterwards. */
LMHEAD_API lmhead_status lmhead_writer_finish(lmhead_writer* writer, uint64_t* num_chunks,
                                              lmhead_error** error);

/* Ends the streams at once; pending calls return LMHEAD_CANCELLED. Returns when nothing submitted
 * is borrowed any more. */
LMHEAD_API void lmhead_writer_cancel(lmhead_writer* writer); /* NULL: nothing */

/* Cancels what is still open, and frees the writer. */
LMHEAD_API void lmhead_writer_close(lmhead_writer* writer); /* NULL: nothing */

#ifdef __cplusplus
}
#endif

#endif /* LMHEAD_CLIENT_C_LMHEAD_H_ */
